"""Imported once by the server that rank processes are forked from: what takes them seconds to import."""

import os

os.environ["DS_ACCELERATOR"] = "cpu"  # read when deepspeed is imported, before a rank has joined its world

import deepspeed
import torch

import parallel.engine.deepspeed

__all__ = ["deepspeed", "parallel", "torch"]
