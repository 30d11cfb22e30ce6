"""TrainStreamTrainer and its parts: options, loss, finite check, checkpoints, memory log."""
