"""verl's name for what a reward manager is given: one sample, numpy arrays in place of tensors."""

from verl.reward.manager import DataProtoItem
from verl.reward.manager import DataProtoView as DataProto

__all__ = ["DataProto", "DataProtoItem"]
