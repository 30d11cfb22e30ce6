"""Checkpoints that are complete or not there, and resuming from the last complete one."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, wait_for_everyone
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints
from transformers.utils import ADAPTER_SAFE_WEIGHTS_NAME

from ts_core.errors import DataError
from ts_hf.adapters import adapter_state_dict, is_peft_model
from ts_hf.checkpoints.atomic import atomic_directory, clean_leftovers

_RNG_NAME = "rng_state.pth"


class CheckpointMixin:
    """Overrides of transformers.Trainer's checkpointing; comes before it in the bases.

    A checkpoint is written beside its final name and renamed. A process killed meanwhile leaves
    the earlier checkpoints as they were, and nothing that resuming would pick up.
    """

    args: Any
    state: Any
    control: Any
    model: Any
    callback_handler: Any
    hp_search_backend: Any

    def _save_checkpoint(self: Any, model: Any, trial: Any) -> None:
        self.before_save()
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        run_dir = Path(self._get_output_dir(trial=trial))
        target = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        self._remember_best(run_dir, target)
        with _directory_of_all(target, self.args) as aside:
            self.save_model(str(aside), _internal_call=True)
            if not self.args.save_only_model:
                self._save_optimizer_and_scheduler(str(aside))
                self._save_scaler(str(aside))
                self._save_rng_state(str(aside))
            self._collect_callback_state()
            if self.args.should_save:
                self.state.save_to_json(str(aside / TRAINER_STATE_NAME))
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(target))
        if self.args.should_save:
            rotate_checkpoints(
                output_dir=str(run_dir),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=False,
            )

    def _remember_best(self: Any, run_dir: Path, target: Path) -> None:
        best_step = self.state.best_global_step
        if not best_step:
            return
        best = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{best_step}"
        if best == target or best.is_dir():
            self.state.best_model_checkpoint = str(best)

    def _collect_callback_state(self: Any) -> None:
        """Put the present state of callbacks that export one into the trainer state."""
        stored = self.state.stateful_callbacks
        fresh: dict[str, Any] = {}
        for callback in [*self.callback_handler.callbacks, self.control]:
            if not isinstance(callback, ExportableState):
                continue
            name, value = type(callback).__name__, callback.state()
            if isinstance(stored.get(name), list):
                fresh.setdefault(name, []).append(value)
            else:
                fresh[name] = value
        stored.update(fresh)

    def _save(self: Any, output_dir: str | None = None, state_dict: Any = None) -> None:
        # The state dict of a wrapped model would decode the whole base; adapters need none of it.
        if state_dict is None and is_peft_model(self.model):
            state_dict = adapter_state_dict(self.model)
        super()._save(output_dir, state_dict=state_dict)  # type: ignore[misc]

    def save_model(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As transformers.Trainer's, after the updates in flight have landed."""
        self.before_save()
        super().save_model(output_dir, _internal_call)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self: Any, checkpoint: str | None) -> None:
        """As transformers.Trainer's, into host memory also where there are several processes.

        transformers would load the state to `args.device` then: more than the device may hold, and
        not possible at all for the "cpu:0" of a local rank.
        """
        device = self.args.device
        self.args.__dict__["_setup_devices"] = torch.device("cpu")
        try:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        finally:
            self.args.__dict__["_setup_devices"] = device

    def _load_from_checkpoint(
        self: Any, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        if not self._adapters_read(Path(resume_from_checkpoint)):
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_best_model(self: Any) -> None:
        if not self._adapters_read(Path(self.state.best_model_checkpoint)):
            super()._load_best_model()  # type: ignore[misc]

    def _adapters_read(self: Any, folder: Path) -> bool:
        """Read every adapter from where PEFT saved it; False where the model has none.

        transformers reads only one, after a resume only that one is trained, and for the best model
        it takes the folder of the adapter "default" for whichever is active.
        """
        if not is_peft_model(self.model):
            return False
        places = {
            name: folder if name == "default" else folder / name for name in self.model.peft_config
        }
        missing = [n for n, at in places.items() if not (at / ADAPTER_SAFE_WEIGHTS_NAME).is_file()]
        if missing:
            raise DataError(
                f"{folder} does not hold the adapter {missing[0]!r} of this model. Give the model "
                f"the adapters, and their names, that it had in the run that saved it."
            )
        with _dtypes_kept(self.model):
            for name, place in places.items():
                self.model.load_adapter(str(place), name, is_trainable=True, torch_device="cpu")
        return True

    def train(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As transformers.Trainer's. Leftovers of a killed run are tidied up first.

        Raises:
            DataError: `resume_from_checkpoint` names a folder that is no complete checkpoint.
            NonFiniteError: the loss or the gradient norm became NaN or infinite.
        """
        if self.args.should_save:
            for line in clean_leftovers(Path(self.args.output_dir)):
                self.say(line)
        if isinstance(resume_from_checkpoint, (str, os.PathLike)):
            resume_from_checkpoint = str(resume_from_checkpoint)
            _check_complete(Path(resume_from_checkpoint), self.args)
        self.forget_unfinished_step()
        try:
            result = super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]
        finally:
            self.heap.release()
        self.before_save()  # the last micro-batch has not been looked at yet
        return result


@contextmanager
def _dtypes_kept(model: nn.Module) -> Iterator[None]:
    """PEFT turns half-precision adapters that it loads to fp32: what trained in bf16 goes on so."""
    before = {name: param.dtype for name, param in model.named_parameters()}
    yield
    for name, param in model.named_parameters():
        dtype = before.get(name, param.dtype)
        if param.dtype is not dtype:
            param.data = param.data.to(dtype)


@contextmanager
def _directory_of_all(target: Path, args: Any) -> Iterator[Path]:
    """`atomic_directory` for every process of the run: all write, the first renames.

    The folder must be one that all processes see. A process that fails leaves the others waiting
    until the launcher ends them; the folder has not been renamed then.
    """
    if args.world_size == 1:
        with atomic_directory(target) as aside:
            yield aside
        return
    if args.process_index == 0:
        with atomic_directory(target) as aside:
            broadcast_object_list([str(aside)])
            yield aside
            wait_for_everyone()  # all have written
        wait_for_everyone()
        return
    name: list[Any] = [None]
    broadcast_object_list(name)
    yield Path(name[0])
    wait_for_everyone()
    wait_for_everyone()  # it has its name


def last_checkpoint(output_dir: Path) -> Path | None:
    """The complete checkpoint of the highest step in `output_dir`, or None.

    It may be one of several processes; each has a file of random state then.
    """
    prefix = f"{PREFIX_CHECKPOINT_DIR}-"
    found = [
        (int(path.name[len(prefix) :]), path)
        for path in (output_dir.iterdir() if output_dir.is_dir() else ())
        if path.is_dir() and path.name.startswith(prefix) and path.name[len(prefix) :].isdigit()
    ]
    complete = [item for item in found if not _missing(item[1], processes=_saved_by(item[1]))]
    return max(complete)[1] if complete else None


def _missing(folder: Path, *, model_only: bool = False, processes: int = 1) -> list[str]:
    """Files that resuming exactly needs and that are not there."""
    wanted = [TRAINER_STATE_NAME]
    if not model_only:
        wanted += [OPTIMIZER_NAME, SCHEDULER_NAME]
        wanted += (
            [_RNG_NAME] if processes == 1 else [f"rng_state_{n}.pth" for n in range(processes)]
        )
    return [name for name in wanted if not (folder / name).is_file()]


def _saved_by(folder: Path) -> int:
    """Of how many processes the checkpoint is."""
    return max(1, len(list(folder.glob("rng_state_*.pth"))))


def _check_complete(folder: Path, args: Any) -> None:
    processes = args.world_size
    missing = _missing(folder, model_only=args.save_only_model, processes=processes)
    saved_by = _saved_by(folder)
    some = (folder / _RNG_NAME).is_file() or saved_by > 1
    if missing and all(name.startswith("rng_state") for name in missing) and some:
        raise DataError(
            f"{folder} was saved by a run of {saved_by} processes and this one has {processes}, so "
            f"its random state does not fit and the run would not go on as it was. Resume with "
            f"{saved_by}, or start from its weights."
        )
    if missing:
        raise DataError(
            f"{folder} is not a complete checkpoint: it has no {', '.join(missing)}. Give a "
            f"checkpoint-N folder that was saved whole, or True for the last one in the output "
            f"folder."
        )
    damaged = [path.name for path in sorted(folder.iterdir()) if _is_damaged(path)]
    if damaged:
        raise DataError(
            f"{folder} is damaged: {', '.join(damaged)} cannot be read. Remove the folder to go on "
            f"from the checkpoint before it."
        )


def _is_damaged(file: Path) -> bool:
    """Whether a file of a checkpoint was cut off or overwritten, as far as its frame tells."""
    try:
        if file.suffix == ".json":
            json.loads(file.read_bytes())
        elif file.suffix == ".safetensors":
            with safe_open(file, framework="pt"):
                pass
        elif file.suffix in (".pt", ".pth"):
            return not zipfile.is_zipfile(file)
    except (ValueError, SafetensorError):
        return True
    return False
