"""Checkpoints that are complete or not there, and resuming from the last complete one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

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
        with atomic_directory(target) as aside:
            self.save_model(str(aside), _internal_call=True)
            if not self.args.save_only_model:
                self._save_optimizer_and_scheduler(str(aside))
                self._save_scaler(str(aside))
                self._save_rng_state(str(aside))
            self._collect_callback_state()
            self.state.save_to_json(str(aside / TRAINER_STATE_NAME))
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(target))
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
            _check_complete(Path(resume_from_checkpoint), model_only=self.args.save_only_model)
        self.forget_unfinished_step()
        result = super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]
        self.before_save()  # the last micro-batch has not been looked at yet
        return result


def last_checkpoint(output_dir: Path) -> Path | None:
    """The complete checkpoint of the highest step in `output_dir`, or None."""
    prefix = f"{PREFIX_CHECKPOINT_DIR}-"
    found = [
        (int(path.name[len(prefix) :]), path)
        for path in (output_dir.iterdir() if output_dir.is_dir() else ())
        if path.is_dir() and path.name.startswith(prefix) and path.name[len(prefix) :].isdigit()
    ]
    complete = [item for item in found if not _missing(item[1])]
    return max(complete)[1] if complete else None


def _missing(folder: Path, *, model_only: bool = False) -> list[str]:
    """Files that resuming exactly needs and that are not there."""
    wanted = [TRAINER_STATE_NAME]
    if not model_only:
        wanted += [OPTIMIZER_NAME, SCHEDULER_NAME, _RNG_NAME]
    return [name for name in wanted if not (folder / name).is_file()]


def _check_complete(folder: Path, *, model_only: bool) -> None:
    missing = _missing(folder, model_only=model_only)
    if missing:
        raise DataError(
            f"{folder} is not a complete checkpoint: it has no {', '.join(missing)}. Give a "
            f"checkpoint-N folder that was saved whole, or True for the last one in the output "
            f"folder."
        )
