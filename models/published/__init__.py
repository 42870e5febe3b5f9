"""The layout that the paper's authors publish models in: names, shapes, settings. No transformers."""
