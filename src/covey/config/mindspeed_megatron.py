"""MindSpeed-RL's Megatron keys, one row each: megatron_training, actor_config, model block, which upstream merges.

Rows that need more than one key stand in mindspeed_rules.py and mindspeed_model.py.
"""

from __future__ import annotations

from typing import Any

from covey.config import lora_keys as lora
from covey.config import mindspeed_model as model
from covey.config import mindspeed_rules as rules
from covey.config.rules import (
    Finding,
    KeyMap,
    built_in,
    honour,
    judged_with,
    mapped,
    no_effect,
    number,
    only,
    unsupported,
)

_FUSED = built_in("a fused kernel is used where the device has one; the numbers do not depend on it")
_LOADED = no_effect("weights are loaded, not initialised")
_MEGATRON = no_effect("a switch of Megatron's own code path")
_RESUME = no_effect("covey train --resume restores the whole state; without it training starts anew")
_RAY = no_effect("Covey runs one program on every rank; no data is passed through Ray actors")
_MOE = unsupported("mixture-of-experts models are not trained", off=(False, None, 0), blocking=True)
_EXPERTS = unsupported("mixture-of-experts models are not trained", off=(1, 0, None), blocking=True)
_MOE_TUNING = no_effect("tunes kernels of mixture-of-experts models")
_PREFERENCE = unsupported("DPO learns off-line from preference pairs", blocking=True)


def _lr(value: Any, run: Any) -> Finding:
    run.set("train.lr", number(value))
    return Finding("honoured", "train.lr")


def _dropout(value: Any, run: Any) -> Finding:
    if number(value) == 0:
        return Finding("honoured", "no dropout")
    return Finding("not supported", "trained without dropout, so that sampling and training agree", differs=True)


MEGATRON: KeyMap = {
    "model": no_effect("names the model block; the checkpoint's config.json describes the model"),
    "stage": rules.stage,
    "algorithm": rules.stage,
    "tokenizer_type": only("PretrainedFromHF", "the Hugging Face tokenizer"),
    "tokenizer_name_or_path": model.tokenizer_path,
    "tokenizer_not_use_fast": unsupported("always the fast tokenizer where there is one"),
    "tokenizer_padding_side": no_effect("sequences are packed, never padded"),
    "pad_to_multiple_of": no_effect("sequences are packed, never padded"),
    "prompt_type": honour("data.prompt_type"),
    "prompt_type_path": unsupported("templates are chosen by data.prompt_type"),
    "vocab_extra_ids": unsupported("the vocabulary is the checkpoint's", off=(0, None)),
    "global_batch_size": rules.global_batch_size,
    "micro_batch_size": rules.micro_batch_size,
    "seq_length": rules.seq_length,
    "seq_len": rules.seq_len,
    "train_iters": honour("train.steps", scale=lambda v: int(number(v))),
    "save_interval": honour("checkpoint.every", scale=lambda v: int(number(v))),
    "log_interval": no_effect("every step is logged; train.print_every thins out the console"),
    "eval_interval": no_effect("upstream has no evaluation in GRPO; here: evaluation.every and data.eval"),
    "eval_iters": no_effect("upstream has no evaluation in GRPO; here: evaluation.every and data.eval"),
    "skip_train": unsupported("evaluation alone: covey evaluate FILE"),
    "data_path": honour("data.train"),
    "split": lambda value, run: (
        Finding("honoured", "all rows are for training")
        if str(value).replace(" ", "").endswith(",0,0")
        else Finding("not supported", "held-out rows are given by data.eval or data.eval_rows", differs=True)
    ),
    "dataset_additional_keys": built_in("every column of a row reaches the reward functions"),
    "no_shuffle": mapped("data.shuffle", "the opposite of no_shuffle", convert=lambda v: not v),
    "full_shuffle_instruction_dataset": no_effect("data.shuffle already shuffles all rows, anew every epoch"),
    "seed": honour("seed", scale=lambda v: int(number(v))),
    "num_workers": no_effect("prompts are tokenised before training"),
    "dataloader_type": no_effect("order comes from seed and data.shuffle"),
    "is_pairwise_dataset": _PREFERENCE,
    "is_instruction_dataset": no_effect("the reference answer is a column, data.response_key"),
    "dpo_loss_type": no_effect("belongs to stage dpo"),
    "ref_model": mapped("model.ref_path", "the frozen reference of the KL term"),
    "refer_model_iter": no_effect("a Hugging Face directory has one set of weights"),
    "bf16": mapped("model.dtype", "bfloat16, on cpu float32", convert=lambda v: "auto" if v else "float32"),
    "fp16": unsupported("use bf16"),
    "use_mcore_models": _MEGATRON,
    "spec": _MEGATRON,
    "transformer_impl": _MEGATRON,
    "ai_framework": _MEGATRON,
    "mm_model": unsupported("multimodal models are not trained", blocking=True),
    "use_distributed_optimizer": built_in("optimizer state is sharded wherever the model is"),
    "overlap_grad_reduce": no_effect("overlap is the sharding's own matter"),
    "overlap_param_gather": no_effect("overlap is the sharding's own matter"),
    "ddp_bucket_size": no_effect("overlap is the sharding's own matter"),
    "use_flash_attn": built_in("packed variable-length attention of the device"),
    "attention_mask_type": no_effect("attention is causal, as the model's is"),
    "shape_order": no_effect("a layout inside Megatron's attention"),
    "use_fused_rmsnorm": _FUSED,
    "use_fused_swiglu": _FUSED,
    "use_fused_rotary_pos_emb": _FUSED,
    "no_masked_softmax_fusion": _MEGATRON,
    "no_gradient_accumulation_fusion": _MEGATRON,
    "gemm_gradient_accumulation_fusion": _MEGATRON,
    "no_bias_dropout_fusion": _MEGATRON,
    "attention_softmax_in_fp32": built_in("softmax and log-probabilities are computed in fp32"),
    "accumulate_allreduce_grads_in_fp32": built_in("gradients are accumulated and reduced in fp32"),
    "no_check_for_nan_in_loss_and_grad": no_effect("a step with a gradient that is not finite is reported"),
    "attention_dropout": _dropout,
    "hidden_dropout": _dropout,
    "init_method_std": _LOADED,
    "distributed_backend": built_in("the backend follows the device: hccl, nccl or gloo"),
    "no_shared_storage": no_effect("each node reads the data itself"),
    "variable_seq_lengths": built_in("sequences are packed at their own lengths"),
    "variable_seq_length": built_in("sequences are packed at their own lengths"),
    "no_pad_to_seq_lengths": built_in("sequences are packed at their own lengths"),
    "reset_attention_mask": built_in("packed sequences never see each other"),
    "reset_position_ids": built_in("positions restart with every sequence"),
    "reuse_fp32_param": no_effect("a memory layout of the NPU optimizer"),
    "swap_optimizer": unsupported("optimizer state stays on the device: needs more memory, same numbers"),
    "swap_attention": mapped("model.gradient_checkpointing", "layers are recomputed, not swapped", convert=bool),
    "recompute_granularity": mapped("model.gradient_checkpointing", "every layer is recomputed", convert=bool),
    "recompute_method": judged_with("recompute_granularity"),
    "recompute_num_layers": no_effect("every layer is recomputed"),
    "recompute_activation_function": no_effect("whole layers are recomputed or none"),
    "npu_deterministic": no_effect("runs with one seed are already equal on one device"),
    "use_ascend_coc": unsupported("communication of tensor parallelism is not overlapped: slower, same numbers"),
    "coc_mode": judged_with("use_ascend_coc"),
    "coc_parallel_num": judged_with("use_ascend_coc"),
    "coc_fused_kernel": judged_with("use_ascend_coc"),
    "use_cp_send_recv_overlap": no_effect("tunes ring attention"),
    "use_fused_ring_attention_update": no_effect("tunes ring attention"),
    "moe_tp_extend_ep": _MOE,
    "expert_model_parallel_size": _EXPERTS,
    "moe_grouped_gemm": _MOE_TUNING,
    "moe_permutation_async_comm": _MOE_TUNING,
    "moe_alltoall_overlap_comm": _MOE_TUNING,
    "moe_token_dispatcher_type": _MOE_TUNING,
    "use_fused_moe_token_permute_and_unpermute": _MOE_TUNING,
    "lora_r": lora.mindspeed_size("lora.rank"),
    "lora_alpha": lora.mindspeed_size("lora.alpha"),
    "lora_target_modules": lora.mindspeed_targets,
    "lora_fusion": no_effect("a fused kernel of LoRA"),
    "lora_ckpt_filter": built_in("checkpoints of a run with LoRA hold the adapter alone; OUTPUT/model is merged"),
    "enable_high_availability": no_effect("a killed run continues with --resume"),
    "load_checkpoint_loosely": no_effect("weights that do not fit are an error"),
    "pretrained_checkpoint": no_effect("accepted upstream without use in RL"),
    "log_throughput": built_in("e2e_tps, update_tps and vllm_tps are always reported"),
    "do_sample": no_effect("accepted upstream without use in RL"),
    "use_kv_cache": no_effect("accepted upstream without use in RL"),
    "use_tp_pp_dp_mapping": no_effect("accepted upstream without use in RL"),
    "optimizer": only("adam", "AdamW"),
    "tensor_model_parallel_size": model.degree("tensor"),
    "pipeline_model_parallel_size": model.degree("pipeline"),
    "context_parallel_size": model.degree("context"),
    "data_parallel_size": model.degree("data"),
    "context_parallel_algo": model.context_algorithm,
    "sequence_parallel": model.sequence_parallel,
    "num_layers_per_virtual_pipeline_stage": judged_with("pipeline_model_parallel_size"),
    "num_layer_list": judged_with("pipeline_model_parallel_size"),
    "noop_layers": judged_with("pipeline_model_parallel_size"),
    "lr": _lr,
    "lr_decay_style": lambda value, run: (
        honour("train.schedule")(value, run)
        if value in ("constant", "linear", "cosine")
        else Finding("not supported", "known: constant, linear, cosine", blocking=True)
    ),
    "min_lr": honour("train.min_lr", scale=number),
    "lr_warmup_fraction": honour("train.warmup_fraction", scale=number),
    "lr_warmup_iters": mapped("train.warmup_steps", "in optimizer steps", convert=lambda v: int(number(v))),
    "weight_decay": honour("train.weight_decay", scale=number, why="matrices only"),
    "clip_grad": honour("train.max_grad_norm", scale=number),
    "adam_beta1": model.beta(0),
    "adam_beta2": model.beta(1),
    "adam_eps": honour("train.eps", scale=number),
    "initial_loss_scale": no_effect("bfloat16 and float32 need no loss scale"),
    "finetune": model.finetune,
    "no_load_optim": _RESUME,
    "no_load_rng": _RESUME,
    "no_save_optim": no_effect("checkpoints hold the optimizer"),
    "no_save_rng": no_effect("checkpoints hold the random state"),
    "load": model.load,
    "save": honour("output_dir"),
    "rms_norm_eps": model.verify("rms_norm_eps"),
    "norm_epsilon": model.verify("rms_norm_eps"),
    "num_layers": model.verify("num_hidden_layers"),
    "hidden_size": model.verify("hidden_size"),
    "ffn_hidden_size": model.verify("intermediate_size"),
    "num_attention_heads": model.verify("num_attention_heads"),
    "num_query_groups": model.verify("num_key_value_heads"),
    "kv_channels": model.verify("head_dim"),
    "rotary_base": model.verify("rope_theta"),
    "max_position_embeddings": model.verify("max_position_embeddings"),
    "padded_vocab_size": model.verify("vocab_size"),
    "untie_embeddings_and_output_weights": model.verify("tie_word_embeddings", convert=lambda v: not v),
    "attention_bias": model.verify("attention_bias"),
    "add_qkv_bias": no_effect("the architecture is the checkpoint's"),
    "disable_bias_linear": no_effect("the architecture is the checkpoint's"),
    "group_query_attention": no_effect("the architecture is the checkpoint's"),
    "position_embedding_type": only("rope", "rotary positions, from the checkpoint"),
    "use_rotary_position_embeddings": no_effect("the architecture is the checkpoint's"),
    "normalization": only("RMSNorm", "the architecture is the checkpoint's"),
    "swiglu": no_effect("the architecture is the checkpoint's"),
    "qk_layernorm": no_effect("the architecture is the checkpoint's"),
    "make_vocab_size_divisible_by": no_effect("the vocabulary is the checkpoint's"),
    "multi_latent_attention": unsupported("multi-latent attention is not packed", blocking=True),
    "num_experts": _MOE,
    **{
        key: no_effect("the architecture is the checkpoint's")
        for key in (
            "rope_scaling_factor", "rope_scaling_mscale", "rope_scaling_mscale_all_dim", "rope_scaling_type",
            "rope_scaling_original_max_position_embeddings", "beta_fast", "beta_slow", "high_freq_factor",
            "low_freq_factor", "original_max_position_embeddings", "use_rope_scaling", "first_k_dense_replace",
            "moe_aux_loss_coeff", "moe_ffn_hidden_size", "moe_layer_freq", "moe_router_enable_expert_bias",
            "moe_router_group_topk", "moe_router_load_balancing_type", "moe_router_num_groups",
            "moe_router_score_function", "moe_router_topk", "moe_router_topk_scaling_factor", "n_shared_experts",
            "norm_topk_prob", "seq_aux", "kv_lora_rank", "q_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim",
            "v_head_dim",
        )
    },
}  # fmt: skip
