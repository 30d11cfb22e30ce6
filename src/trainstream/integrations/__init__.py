"""trainstream together with other libraries; see `trainstream.integrations.huggingface`."""
