/* SPDX-License-Identifier: Apache-2.0
 * C ABI of Tessera. Structs start with their size: fields beyond what an older caller knew read as 0,
 * which is every field's default. Functions return a tessera_status_code, but for tessera_abi_version, tessera_version
 * and tessera_last_error, which return what they are named after, and destroy and abort, which return nothing. The
 * text of the last failure on this thread is tessera_last_error(). Shapes, types and rules: moe.hpp says them once. */
#ifndef TESSERA_H
#define TESSERA_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TESSERA_ABI_VERSION 1

typedef enum {
  TESSERA_OK = 0,
  TESSERA_INVALID_ARGUMENT = 1,
  TESSERA_UNSUPPORTED = 2,
  TESSERA_ENVIRONMENT = 3,
  TESSERA_DEVICE_ERROR = 4,
  TESSERA_OUT_OF_MEMORY = 5,
  TESSERA_INTERNAL = 6
} tessera_status_code;

typedef enum {
  TESSERA_NONE = 0,
  TESSERA_FP32 = 1,
  TESSERA_BF16 = 2,
  TESSERA_FP16 = 3,
  TESSERA_INT32 = 4,
  TESSERA_INT64 = 5,
  TESSERA_UINT8 = 6, /* of masks */
  TESSERA_FP8_E4M3 = 7,
  TESSERA_E8M0 = 8 /* scales of mxfp8 */
} tessera_dtype;

typedef enum { TESSERA_CPU = 0, TESSERA_CUDA = 1 } tessera_device_kind;
/* TESSERA_UNPROVEN_KERNELS takes a GPU whose kernels no GPU has run (context.hpp). */
typedef enum { TESSERA_UNPROVEN_KERNELS = 1 } tessera_context_flag;

typedef enum {
  TESSERA_PASS_FORWARD = 0,
  TESSERA_PASS_BACKWARD = 1,
  TESSERA_PASS_BACKWARD_INPUT = 2,
  TESSERA_PASS_BACKWARD_WEIGHTS = 3,
  TESSERA_PASS_ROUTE = 4
} tessera_pass;

/* A view of caller-owned memory; rank 0 means absent. Strides in elements, the last one 1. */
typedef struct {
  void* data;
  int32_t dtype;
  int32_t device_kind;
  int32_t device_index;
  int32_t rank;
  int64_t shape[4];
  int64_t stride[4];
} tessera_tensor;

typedef struct {
  void* data;
  size_t bytes;
} tessera_buffer;

/* Sizes and options of one layer call. activation, layout_order, layout_orientation, router, round,
 * score_position, save and grouping take the numbers of the enums in shape.hpp.
 * 0 means the default everywhere: dtype fp32, ids int32, tile 128, route_scale 1, alpha 1, no limit
 * (clamped swiglu: limit 0 = none). up_offset is taken as it is: 0 stays 0. shape.hpp's Activation has
 * other defaults, 1.702, 7 and 1, which a C caller writes out. Other activations read none of the three: leave 0. */
typedef struct {
  uint64_t size;
  int64_t tokens, hidden, intermediate, experts, top_k, slots;
  int32_t dtype, activation, layout_order, layout_orientation, layout_block, bias;
  int32_t score_position, save, grouping, ids_dtype, variable_experts, reserved;
  float alpha, limit, up_offset;
  int32_t router, normalize_scores, groups, top_groups, round, tile;
  float route_scale;
  uint32_t layer;
  uint64_t seed, step;
  int64_t capacity;
  int32_t replay;
  int32_t overwrite_h;  /* 1: backward leaves dh in the memory of h; save h only */
  int64_t column_chunk; /* most columns of hidden whose y or dx rows exist at a time; 0: all */
  int32_t router_dtype; /* of w_router and b_router; 0: dtype, or TESSERA_FP32 beside bf16 */
  int32_t reserved_router;
  int32_t precision;   /* of the GEMMs: Precision in shape.hpp; 0: native */
  int32_t pow2_scales; /* of precision fp8: 0 or 1 */
  int32_t
      weight_codes; /* where it is fp8: 1: weights come as codes, in weight_codes of the arguments */
  int32_t reserved_codes;
} tessera_moe_desc;

typedef struct {
  tessera_tensor w_up, w_gate, w_down, b_up, b_gate, b_down;
} tessera_expert_weights;

/* WeightCodes in moe.hpp. */
typedef struct {
  tessera_tensor up, up_scales, down, down_scales, up_transposed, down_transposed;
} tessera_weight_codes;

typedef struct {
  uint64_t size;
  tessera_tensor x;
  tessera_tensor topk_ids, topk_weights, token_offsets;
  tessera_tensor w_router, b_router, selection_bias;
  tessera_tensor expert_offsets, row_scores;
  tessera_expert_weights weights;
  tessera_tensor o, logits, expert_counts, h;
  tessera_buffer routing, workspace;
  tessera_tensor topk_counts;
  tessera_tensor token_mask;
  tessera_tensor x8, x_scale, h_scale; /* precision fp8 and mxfp8: moe.hpp */
  tessera_weight_codes weight_codes;
} tessera_forward_args;

typedef struct {
  uint64_t size;
  tessera_tensor d_o, x, h;
  tessera_buffer routing;
  tessera_tensor w_router, b_router;
  tessera_expert_weights weights;
  tessera_tensor dx, dscores, dlogits;
  tessera_tensor dw_up, dw_gate, dw_down, db_up, db_gate, db_down, dw_router, db_router;
  int32_t accumulate; /* 0: gradients are overwritten, 1: the complete fp32 sum is added once */
  int32_t reserved;
  tessera_tensor dh, a_scaled, dlogits_saved;
  tessera_buffer workspace;
  tessera_tensor aux_dlogits;
  tessera_tensor token_mask;
  tessera_tensor x8, x_scale, h_scale; /* precision fp8 and mxfp8: as forward left them */
  tessera_weight_codes weight_codes;
} tessera_backward_args;

typedef struct {
  uint64_t size;
  tessera_tensor x, w_router, b_router, selection_bias;
  tessera_tensor topk_ids, topk_weights, logits;
  tessera_buffer workspace;
  tessera_tensor token_offsets;
  tessera_tensor token_mask;
} tessera_route_args;

/* Losses of a router's logits and their gradient: balance.hpp. d_loss 0 means 1, scope_tokens 0 all tokens. */
typedef struct {
  uint64_t size;
  tessera_tensor logits, topk_counts;
  int64_t scope_tokens;
  float balance, z, d_loss, reserved;
  tessera_tensor losses, dlogits;
  tessera_buffer workspace;
  tessera_tensor token_mask, topk_ids, sequence_offsets, sequence_loss;
  float sequence_balance, reserved_float;
} tessera_router_loss_args;

typedef struct {
  uint64_t size;
  tessera_tensor topk_counts, selection_bias;
  float rate; /* no default: 0 changes nothing */
  int32_t subtract_mean;
} tessera_selection_bias_args;

typedef struct {
  uint64_t size;
  int32_t kind; /* 0 varlen-M, 1 varlen-K */
  int32_t transpose_b;
  int32_t accumulate;
  int32_t reserved;
  tessera_tensor a, b, bias, expert_offsets, c;
  tessera_buffer workspace;
} tessera_grouped_gemm_args;

/* Experts spread over the GPUs of a host, and their bounds: expert_parallel.hpp. time_limit 0: 30 s. partial_combine:
 * 0 or 1; until 1.0 it is called sums_on_owners as well. alpha, limit and up_offset as in tessera_moe_desc. sms 0:
 * all. */
typedef struct {
  uint64_t size;
  int32_t rank, ranks;
  int64_t max_tokens, hidden, intermediate, experts, top_k;
  int32_t activation;
  union {
    int32_t partial_combine, sums_on_owners;
  };
  float alpha, limit, up_offset;
  int32_t training; /* 0 or 1 */
  double time_limit;
  int32_t sms;
  int32_t reserved;
} tessera_expert_parallel_desc;

/* expert_offsets, row_origins, row_scores and h are absent (rank 0), or saved for backward: ExpertParallelArgs in
 * expert_parallel.hpp. */
typedef struct {
  uint64_t size;
  tessera_tensor x, topk_ids, topk_weights, w_up, w_down, o;
  tessera_tensor expert_offsets, row_origins, row_scores, h;
  int32_t may_overflow; /* 0 or 1 */
  int32_t reserved;
  tessera_tensor b_up, b_down; /* both absent, or of clamped swiglu */
} tessera_expert_parallel_args;

/* An unfused pass: ExpertRouteArgs, DispatchTables and so on in expert_parallel.hpp. Tensors of rank 0 are absent. */
typedef struct {
  uint64_t size;
  tessera_tensor topk_ids, topk_weights;
  union {
    int64_t row_limit, room; /* rows, 0: any; room is the old name, until 1.0 */
  };
} tessera_expert_route_args;

typedef struct {
  uint64_t size;
  tessera_tensor x, second_x, topk_ids;
  tessera_tensor expert_offsets, row_origins, row_scores;
  tessera_tensor rows, second_rows;
  int32_t may_overflow; /* 0 or 1 */
  int32_t sms;          /* 0: all */
  void* begun;          /* cudaEvent_t or NULL */
  int32_t gathered;     /* 0 or 1 */
  int32_t reserved;
  tessera_buffer routing; /* or no memory */
} tessera_expert_dispatch_args;

typedef struct {
  uint64_t size;
  tessera_tensor rows, expert_offsets, row_origins;
  tessera_tensor topk_weights, row_dscores, dscores, o;
  int32_t sms; /* 0: all */
  int32_t reserved;
  void* begun; /* cudaEvent_t or NULL */
} tessera_expert_combine_args;

typedef struct {
  char bytes[128];
} tessera_peer_group_id;

typedef struct tessera_context tessera_context;
typedef struct tessera_peer_window tessera_peer_window;
typedef struct tessera_expert_parallel tessera_expert_parallel;

/* The calls of a backward pass, which tessera_expert_parallel_backward makes one after the other. */
typedef struct {
  uint64_t size;
  tessera_expert_dispatch_args const* dispatch; /* or NULL: its rows have come */
  tessera_context const* context;
  tessera_moe_desc const* input_desc;
  tessera_backward_args const* input;
  tessera_moe_desc const* weights_desc; /* and weights; or NULL: no gradients of weights */
  tessera_backward_args const* weights;
  tessera_expert_combine_args const* combine; /* without begun where there is a side stream */
  void* side_stream;                          /* cudaStream_t of combine, or NULL */
  /* or NULL: of second_x, on the side stream, where `dispatch` has x alone */
  tessera_expert_dispatch_args const* second_dispatch;
} tessera_expert_backward_args;

/* ABI the library was built with, and its version as text. */
int tessera_abi_version(void);
char const* tessera_version(void);
/* Text of the last failure on this thread; "" if there was none. Valid until the thread's next call. */
char const* tessera_last_error(void);

/* num_threads 0: as many as the process may use, on cuda 1. */
int tessera_context_create(int32_t device_kind, int32_t device_index, int32_t num_threads,
                           tessera_context** context);
/* The same, flags: a sum of TESSERA_UNPROVEN_KERNELS and no others. Errors: invalid_argument for an unknown flag. */
int tessera_context_create_with(int32_t device_kind, int32_t device_index, int32_t num_threads,
                                int32_t flags, tessera_context** context);
void tessera_context_destroy(tessera_context* context); /* NULL is allowed */
/* Reports a bad value that a kernel met on the device since the last call, if any; does not wait (context.hpp). */
int tessera_check_device_values(tessera_context const*);

int tessera_moe_workspace(tessera_context const*, tessera_moe_desc const*, int pass, size_t* bytes);
/* *constant: 1 where every score of the router is one number whatever its logits are, so that no gradient of o can
 * reach them (scores_are_constant in router.hpp), else 0. */
int tessera_moe_scores_are_constant(tessera_moe_desc const*, int32_t* constant);
int tessera_moe_saved(tessera_moe_desc const*, size_t* x_bytes, size_t* h_bytes,
                      size_t* routing_bytes);
/* *precision: that of the desc, or what automatic takes on this context. tessera_moe_saved and
 * tessera_moe_saved_scales refuse automatic: what is saved depends on what it takes. chosen_precision in moe.hpp */
int tessera_moe_precision(tessera_context const*, tessera_moe_desc const*, int32_t* precision);
/* Bytes of the scales that stay beside x8 and h; 0 with precision native. */
int tessera_moe_saved_scales(tessera_moe_desc const*, size_t* x_scale_bytes, size_t* h_scale_bytes);

/* Makes what calls with weight_codes read; transposed codes may be absent. low_precision.hpp */
int tessera_quantise_weights(tessera_context const*, tessera_moe_desc const*,
                             tessera_expert_weights const*, tessera_weight_codes const* out,
                             void* stream);

int tessera_moe_forward(tessera_context const*, tessera_moe_desc const*,
                        tessera_forward_args const*, void* stream);
int tessera_moe_backward(tessera_context const*, tessera_moe_desc const*,
                         tessera_backward_args const*, void* stream);
int tessera_moe_backward_input(tessera_context const*, tessera_moe_desc const*,
                               tessera_backward_args const*, void* stream);
int tessera_moe_backward_weights(tessera_context const*, tessera_moe_desc const*,
                                 tessera_backward_args const*, void* stream);
int tessera_route(tessera_context const*, tessera_moe_desc const*, tessera_route_args const*,
                  void* stream);
/* Writes into routing the tables that a forward pass of these grouped rows would leave; row_scores may be absent. */
int tessera_routing_of_groups(tessera_context const*, tessera_moe_desc const*,
                              tessera_tensor expert_offsets, tessera_tensor row_scores,
                              tessera_buffer routing, void* stream);
int tessera_router_loss_workspace(tessera_context const*, tessera_moe_desc const*, size_t* bytes);
/* The same with sequence_balance and this number of sequences. */
int tessera_router_loss_workspace_of(tessera_context const*, tessera_moe_desc const*,
                                     int64_t sequences, size_t* bytes);
int tessera_router_loss(tessera_context const*, tessera_moe_desc const*,
                        tessera_router_loss_args const*, void* stream);
int tessera_update_selection_bias(tessera_context const*, tessera_selection_bias_args const*,
                                  void* stream);
int tessera_grouped_gemm_workspace(tessera_context const*, tessera_grouped_gemm_args const*,
                                   size_t* bytes);
int tessera_grouped_gemm(tessera_context const*, tessera_grouped_gemm_args const*, void* stream);

/* nccl_path NULL: libnccl.so.2. addresses: `ranks` of them. close waits for this rank's GPU and frees the handle,
   whatever it returns. What peers have mapped stays until they close, too; no rank should close while another may
   still launch a pass. abort, after a fault, waits and frees as close does, but leaves the group without the
   others. */
int tessera_peer_group_id_make(char const* nccl_path, tessera_peer_group_id* id);
int tessera_peer_window_open(tessera_context const*, int32_t rank, int32_t ranks,
                             tessera_peer_group_id const* id, size_t bytes, char const* nccl_path,
                             tessera_peer_window** window);
/* Makes the windows of all ranks, which are threads of this process: rank r on GPU device_indices[r]; `ranks` of them.
   All memory is freed when the last one is closed or aborted. */
int tessera_peer_window_open_all(int32_t const* device_indices, int32_t ranks, size_t bytes,
                                 tessera_peer_window** windows);
int tessera_peer_window_addresses(tessera_peer_window const*, void** addresses);
int tessera_peer_window_close(tessera_peer_window*);
void tessera_peer_window_abort(tessera_peer_window*); /* NULL is allowed */

int tessera_expert_parallel_window(tessera_expert_parallel_desc const*, size_t* bytes);
int tessera_expert_parallel_workspace(tessera_context const*, tessera_expert_parallel_desc const*,
                                      size_t* bytes);
int tessera_expert_parallel_create(tessera_context const*, tessera_expert_parallel_desc const*,
                                   void* const* windows, tessera_buffer workspace,
                                   tessera_expert_parallel**);
/* NULL is allowed. Waits for all work of this rank's GPU. */
void tessera_expert_parallel_destroy(tessera_expert_parallel*);
/* The places of x and, with training, of second_x in this rank's window. */
int tessera_expert_parallel_input(tessera_expert_parallel const*, void** x);
int tessera_expert_parallel_second_input(tessera_expert_parallel const*, void** second_x);
int tessera_expert_parallel_forward(tessera_expert_parallel*, tessera_expert_parallel_args const*,
                                    void* stream);
int tessera_expert_parallel_route(tessera_expert_parallel*, tessera_expert_route_args const*,
                                  void* stream);
/* Waits for the rows of the last pass that counted them, or of one passes_ago before it; all_fit: 0 or 1, or NULL. */
int tessera_expert_parallel_routed_rows(tessera_expert_parallel*, int64_t passes_ago, int64_t* rows,
                                        int32_t* all_fit);
int tessera_expert_parallel_dispatch(tessera_expert_parallel*, tessera_expert_dispatch_args const*,
                                     void* stream);
int tessera_expert_parallel_combine(tessera_expert_parallel*, tessera_expert_combine_args const*,
                                    void* stream);
/* dispatch, moe_backward_input, combine and moe_backward_weights: ExpertParallel::backward() in expert_parallel.hpp. */
int tessera_expert_parallel_backward(tessera_expert_parallel*, tessera_expert_backward_args const*,
                                     void* stream);
int tessera_expert_parallel_check(tessera_expert_parallel const*); /* does not wait */

#ifdef __cplusplus
}
#endif
#endif
