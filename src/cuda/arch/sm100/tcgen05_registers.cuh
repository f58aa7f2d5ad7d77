// SPDX-License-Identifier: Apache-2.0
// Thirty-two registers as the operands of a tcgen05.ld or .st.
#pragma once

// clang-format off
#define TESSERA_TENSOR_8(constraint, r, i) \
  constraint((r)[(i) + 0]), constraint((r)[(i) + 1]), constraint((r)[(i) + 2]), constraint((r)[(i) + 3]), \
  constraint((r)[(i) + 4]), constraint((r)[(i) + 5]), constraint((r)[(i) + 6]), constraint((r)[(i) + 7])
#define TESSERA_TENSOR_32(constraint, r) \
  TESSERA_TENSOR_8(constraint, r, 0), TESSERA_TENSOR_8(constraint, r, 8), \
  TESSERA_TENSOR_8(constraint, r, 16), TESSERA_TENSOR_8(constraint, r, 24)
#define TESSERA_TENSOR_32_OPERANDS \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
  "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}"
// clang-format on
