# SPDX-License-Identifier: Apache-2.0
"""Experts of a layer over several hosts: what stands behind ExpertParallel(hosts=) and ExpertParallel(device="cpu").

topology.py says which ranks share a host, messages.py sends rows between hosts along the rails, rotation.py makes a
pass of an inner pass for each host, cpu_session.py is the inner pass of ranks without a GPU, faults.py names who did
not come, watch.py ends waits of a GPU's stream, and advice.py says when another way sends fewer bytes. Use and limits:
docs/several-hosts.md.
"""
