"""The data paths below a communicator, and how a group of ranks gets one.

base        what a data path offers                       request, establish   what ranks must ask for alike; all agree
hostcalls   calls that the host drives: cpu, alltoall     gpu_group, link      a group of GPUs, and its host's side
gpu         calls that are one launch                     nvls                 whether the switch may add
slots       the `owner` combine in plain torch            gpu_faults           what kernels left behind, as errors
"""
