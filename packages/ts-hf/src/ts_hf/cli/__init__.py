"""The `trainstream finetune` command."""
