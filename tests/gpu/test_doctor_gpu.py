"""The doctor on a machine with a GPU: it asks and changes nothing."""

from __future__ import annotations

import json

import torch

from bicomm import doctor


def test_the_gpus_are_found_and_nothing_is_allocated() -> None:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    found = json.loads(json.dumps(doctor.examine()))
    assert torch.cuda.memory_allocated() == before
    assert [gpu["capability"] for gpu in found["gpus"]] == [
        "{}.{}".format(*torch.cuda.get_device_capability(index)) for index in range(torch.cuda.device_count())
    ]
    assert found["versions"]["driver"] and found["versions"]["nccl"] and found["versions"]["triton"]
    count = len(found["gpus"])
    assert [len(row) for row in found["peer_access"]] == [count] * count
    assert {row["mode"]: bool(row["executor"]) for row in found["executors"]} == dict.fromkeys(doctor.MODES, True)
    # Where one GPU is all there is, no switch can add, and the reason is said.
    assert all(isinstance(gpu["multicast"], str) for gpu in found["gpus"])
    assert count > 1 or found["gpus"][0]["multicast"]
