"""Block replay: a block's forward and backward captured once and replayed (`cuda_graphs`).

A graph reads and writes fixed addresses and runs none of the block's Python code. So all of this
folder answers two questions: what must be as it was when the graph was made (`signature`,
`watch`, `inspector`), and who owns the memory between two replays (`recording`, `memory`).
"""

from ts_core.engine.replay.cuda_recorder import CudaRecorder
from ts_core.engine.replay.policy import BlockReplay
from ts_core.engine.replay.recorder import Recorded, Recorder
from ts_core.engine.replay.setup import recorder_for, replay_for

__all__ = [
    "BlockReplay",
    "CudaRecorder",
    "Recorded",
    "Recorder",
    "recorder_for",
    "replay_for",
]
