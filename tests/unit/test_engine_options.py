"""Every option of vLLM's engine is refused with a reason or known to be harmless, so that an upgrade shows new ones."""

from __future__ import annotations

import pytest

from asyncrl.config.passthrough import ENGINE_REFUSED, ENGINE_REFUSED_PREFIXES, check_engine_options
from asyncrl.generator.vllm_backend.setup import engine_option_names

ALLOWED = {
    "loading": """
        download_dir hf_token ignore_patterns load_format max_parallel_loading_workers model_impl
        model_loader_extra_config pt_load_map_location safetensors_load_strategy safetensors_prefetch_block_size
        safetensors_prefetch_num_threads use_tqdm_on_load""",
    # Another precision than the learner's: the engine's log-probs are those of what it computes, and the mismatch is
    # measured and corrected.
    "numerics": """
        allow_deprecated_quantization disable_cascade_attn disable_sliding_window
        enable_mamba_cache_stochastic_rounding kv_cache_dtype kv_cache_dtype_skip_layers mamba_cache_dtype
        mamba_cache_philox_rounds mamba_ssm_cache_dtype quantization quantization_config use_fp64_gumbel""",
    "kernels": """
        additional_config all2all_backend attention_backend attention_config compilation_config
        cudagraph_capture_sizes disable_custom_all_reduce enable_flashinfer_autotune enforce_eager engram_config
        gdn_prefill_backend ir_op_priority kda_decode_backend kda_prefill_backend kernel_config linear_backend
        mamba_backend mamba_config mamba_ssu_algorithm max_cudagraph_capture_size moe_backend optimization_level
        replayssm_buffer_len sparse_indexer_topk_backend use_replayssm""",
    "memory": """
        block_size cpu_offload_gb cpu_offload_params disable_hybrid_kv_cache_manager enable_cumem_allocator
        enable_shm_tensor_arena mamba_block_size mamba_cache_mode max_model_len num_gpu_blocks_override
        swa_bounded_replay""",
    # Cached keys and values carry their version as a salt.
    "prefix caching": """
        enable_mamba_shared_prefix_checkpoint enable_prefix_caching prefix_cache_retention_interval
        prefix_caching_hash_algo prefix_match_unit""",
    # Tokens carry the version of the batch that sampled them, whatever is scheduled when.
    "scheduling": """
        async_scheduling disable_chunked_mm_input enable_chunked_prefill kv_sharing_fast_prefill
        long_prefill_token_threshold long_prefill_token_threshold_adaptive max_num_active_seqs
        max_num_batched_tokens max_num_queued_reqs max_num_queued_tokens max_num_scheduled_tokens performance_mode
        prefill_schedule_interval scheduler_reserve_full_isl scheduling_policy stream_interval watermark""",
    # Completions ask for none of this.
    "requests": """
        aux_output_config enable_prompt_embeds enable_return_routed_experts enable_trace_replay io_processor_plugin
        max_logprobs pooler_config reasoning_config reasoning_parser reasoning_parser_plugin renderer_num_workers
        return_sampling_mask skip_tokenizer_init structured_outputs_config tokenizer_mode tokens_only""",
    "other inputs than text": """
        allowed_local_media_path allowed_media_domains ec_manager_config ec_transfer_config enable_mm_embeds
        interleave_mm_strings language_model_only limit_mm_per_prompt media_io_kwargs mm_device_do_normalize
        mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin
        mm_encoder_fp8_scale_save_path mm_encoder_tp_mode mm_hasher_algorithm mm_ipc_gpu_memory_gb
        mm_processor_cache_gb mm_processor_cache_type mm_processor_device mm_processor_kwargs
        mm_shm_cache_max_object_size_mb mm_tensor_ipc skip_mm_profiling video_pruning_method video_pruning_rate""",
    # Without effect while the option that turns them on is refused.
    "of what is refused": """
        cp_kv_cache_interleave_size cpu_distributed_timeout_seconds dbo_decode_token_threshold
        dbo_prefill_token_threshold dcp_comm_backend dcp_kv_cache_interleave_size dcp_q_replicate
        disable_nccl_for_dp_synchronization distributed_timeout_seconds dp_sync_interval elastic_ep_max_dp_size
        enable_batch_sharded_sampling enable_dbo enable_ep_weight_filter enable_hc_sp enable_mixed_moe_lora_format
        enable_moe_shared_loras enable_nccl_comm_suspend enable_tower_connector_lora eplb_config
        expert_placement_strategy fully_sharded_loras kv_events_config lora_dtype lora_target_modules master_addr
        master_port max_cpu_loras max_lora_cls_labels max_lora_rank max_loras ray_workers_use_nsight
        sleep_mode_offload_cudagraph sleep_preserve_parameter_names specialize_active_lora ubatch_size""",
    "process and logs": """
        aggregate_engine_logging collect_detailed_traces cudagraph_metrics custom_histogram_buckets
        enable_fault_tolerance enable_layerwise_nvtx_tracing enable_logging_iteration_details enable_mfu_metrics
        enable_mm_processor_stats fail_on_environ_validation fault_tolerance_config jit_monitor_mode
        jit_monitor_verbose kv_cache_metrics kv_cache_metrics_sample log_config_file log_level logging_config
        numa_bind numa_bind_cpus numa_bind_nodes otlp_traces_endpoint per_request_spec_decode_metrics
        profiler_config served_model_name show_hidden_metrics_for_version shutdown_timeout""",
}


def refused(name: str) -> bool:
    return name in ENGINE_REFUSED or name.startswith(tuple(ENGINE_REFUSED_PREFIXES))


def test_every_option_of_the_installed_vllm_is_judged_once() -> None:
    installed = engine_option_names()
    allowed = [name for names in ALLOWED.values() for name in names.split()]
    assert len(installed) > 200
    assert [name for name in installed if not refused(name) and name not in allowed] == [], "judge these options"
    assert [name for name in allowed if refused(name) or allowed.count(name) > 1] == []
    assert sorted({*allowed, *ENGINE_REFUSED} - {*installed}) == [], "vLLM has these options no more"


def test_another_engine_has_its_own_options() -> None:
    check_engine_options({"max_model_len": 64, "max_num_batched_tokens": 8}, "transformers")
    for options, why in (
        ({"enforce_eager": True}, "it is none of those of the engine transformers, max_model_len and max_num_batched"),
        ({"max_num_batched_tokens": 0}, "must be a number of tokens, at least 1"),
        ({"max_model_len": 1}, "must be a number of tokens, at least 2"),
    ):
        with pytest.raises(ValueError, match=why):
            check_engine_options(options, "transformers")
    check_engine_options({"anything": 1}, "own.py:Engine")


@pytest.mark.parametrize("name", [*ENGINE_REFUSED, "data_parallel_size", "offload_group_size", "_api_process_rank"])
def test_what_is_refused_says_why(name: str) -> None:
    with pytest.raises(ValueError, match=rf"engine_options.{name} = 1: cannot be set here: \w+ \w+"):
        check_engine_options({name: 1}, "vllm")
