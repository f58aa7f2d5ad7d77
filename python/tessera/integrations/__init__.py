# SPDX-License-Identifier: Apache-2.0
"""Seams of training frameworks: torchtitan, Megatron-LM. Their objects are used as they come, and neither is needed:
the torchtitan that is installed is imported for its overrides alone.
"""
