"""The storage formats, one module each; `base` says what a codec is."""
