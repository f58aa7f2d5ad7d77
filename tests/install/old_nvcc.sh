#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# What an nvcc that is too old says of itself.
echo 'Cuda compilation tools, release 12.4, V12.4.131'
