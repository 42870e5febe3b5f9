"""Models in the layouts of others: the authors' published one, and Hugging Face folders of ours."""
