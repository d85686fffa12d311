"""verl's module with the argument of reward managers: one sample, with numpy arrays instead of tensors."""

from verl.reward.manager import DataProtoItem
from verl.reward.manager import DataProtoView as DataProto

__all__ = ["DataProto", "DataProtoItem"]
