"""What is trained: the KVM operator and its kernels, the layers, the backbone and its Hugging Face face."""
