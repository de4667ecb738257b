"""Writing a checkpoint where other tools read it: a Hugging Face folder, whole or in NVFP4."""
