"""Operators: functions of tensors that know no rank, no group and no config.

Importing this imports no torch.
"""
