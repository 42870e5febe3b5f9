"""Imported once by the process that ranks are forked from: what takes each of them seconds to import."""

import os

os.environ["DS_ACCELERATOR"] = "cpu"  # read when deepspeed is imported, before a rank has joined its world

import deepspeed
import torch._dynamo

import parallel.engine.deepspeed

__all__ = ["deepspeed", "parallel", "torch"]
