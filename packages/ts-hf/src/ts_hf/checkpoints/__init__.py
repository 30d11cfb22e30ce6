"""Checkpoint files: reading them tensor by tensor, writing folders all or nothing."""
