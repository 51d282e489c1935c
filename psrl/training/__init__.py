"""The trainer: FSDP2 ranks over Hugging Face models, and supervised fine-tuning."""
