"""What a Hugging Face folder of ours holds besides its weights. No transformers."""
