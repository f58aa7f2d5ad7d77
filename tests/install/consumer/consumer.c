/* SPDX-License-Identifier: Apache-2.0
 * One layer through the C ABI: with all weights equal, every row of o is the same number; and an error is a
 * code with a text. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tessera/tessera.h"

enum { T = 3, D = 16, N = 8, E = 4, K = 2 };

static tessera_tensor fp32(float* data, int rank, int64_t s0, int64_t s1, int64_t s2) {
  tessera_tensor tensor;
  memset(&tensor, 0, sizeof tensor);
  tensor.data = data;
  tensor.dtype = TESSERA_FP32;
  tensor.device_kind = TESSERA_CPU;
  tensor.rank = rank;
  tensor.shape[0] = s0;
  tensor.shape[1] = s1;
  tensor.shape[2] = s2;
  tensor.stride[rank - 1] = 1;
  for (int axis = rank - 2; axis >= 0; --axis)
    tensor.stride[axis] = tensor.stride[axis + 1] * tensor.shape[axis + 1];
  return tensor;
}

static int fail(char const* what) {
  printf("%s: %s\n", what, tessera_last_error());
  return 1;
}

int main(void) {
  static float x[T * D], w_up[E * 2 * N * D], w_down[E * D * N], w_router[E * D], o[T * D];
  for (int i = 0; i < T * D; ++i) x[i] = 1.0f;
  for (int i = 0; i < E * 2 * N * D; ++i) w_up[i] = 1.0f / D;
  for (int i = 0; i < E * D * N; ++i) w_down[i] = 1.0f / N;

  tessera_moe_desc desc;
  memset(&desc, 0, sizeof desc);
  desc.size = sizeof desc;
  desc.tokens = T;
  desc.hidden = D;
  desc.intermediate = N;
  desc.experts = E;
  desc.top_k = K;
  desc.router = 1; /* topk_softmax: the scores of a token add up to 1 */
  desc.save = 2;   /* inference */

  tessera_context* context = NULL;
  if (tessera_context_create(TESSERA_CPU, 0, 1, &context)) return fail("context");
  size_t bytes = 0;
  if (tessera_moe_workspace(context, &desc, TESSERA_PASS_FORWARD, &bytes)) return fail("workspace");

  tessera_forward_args args;
  memset(&args, 0, sizeof args);
  args.size = sizeof args;
  args.x = fp32(x, 2, T, D, 0);
  args.w_router = fp32(w_router, 2, E, D, 0);
  args.weights.w_up = fp32(w_up, 3, E, 2 * N, D);
  args.weights.w_down = fp32(w_down, 3, E, D, N);
  args.o = fp32(o, 2, T, D, 0);
  args.workspace.data = malloc(bytes);
  args.workspace.bytes = bytes;
  if (tessera_moe_forward(context, &desc, &args, NULL)) return fail("forward");

  /* gate = up = 1, so a = silu(1) * 1, and y = o = a. */
  float const expected = 1.0f / (1.0f + expf(-1.0f));
  for (int i = 0; i < T * D; ++i) {
    if (!(fabsf(o[i] - expected) < 1e-5f)) {
      printf("o[%d] = %g instead of %g\n", i, o[i], expected);
      return 1;
    }
  }

  desc.top_k = E + 1;
  if (tessera_moe_forward(context, &desc, &args, NULL) != TESSERA_INVALID_ARGUMENT ||
      tessera_last_error()[0] == '\0') {
    printf("K > E was not refused\n");
    return 1;
  }
  free(args.workspace.data);
  tessera_context_destroy(context);
  printf("C: libtessera %s works\n", tessera_version());
  return 0;
}
