// SPDX-License-Identifier: Apache-2.0
// The shared memory that a launch asked for, by a name for its first byte; aligned as the 128-byte swizzle wants it.
// A function that hands out its address gives other machine code.
#pragma once

#define TESSERA_DYNAMIC_SHARED(name) extern __shared__ __align__(1024) unsigned char name[]

// The same as an array, whose elements need no more than their own alignment.
#define TESSERA_DYNAMIC_SHARED_ARRAY(type, name) extern __shared__ type name[]
