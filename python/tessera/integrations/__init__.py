# SPDX-License-Identifier: Apache-2.0
"""Seams of training frameworks: torchtitan, Megatron-LM. Neither is imported; their objects are used as they come."""
