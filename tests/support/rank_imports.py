"""Imported once by the process that ranks are forked from: what takes each of them seconds to import."""

import gc
import os

os.environ["DS_ACCELERATOR"] = "cpu"  # read when deepspeed is imported, before a rank has joined its world

import deepspeed.runtime.zero.muon.muon_optimizer
import torch._inductor.compile_fx

import parallel.engine.deepspeed

__all__ = ["deepspeed", "parallel", "torch"]
deepspeed.ops.__compatible_ops__  # noqa: B018  probes compilers, once
gc.freeze()  # a collection in a rank need not look through all of it
