"""The options of the engine: those that are tested are taken, all others are refused with a reason."""

from __future__ import annotations

import dataclasses

import pytest

from asyncrl.config.engine_options import ENGINE_KEYS, ENGINE_OPTIONS, check_engine_options


def test_the_options_are_ones_of_the_installed_vllm() -> None:
    from vllm import EngineArgs

    assert {*ENGINE_OPTIONS, *ENGINE_KEYS} <= {field.name for field in dataclasses.fields(EngineArgs)}
    assert not {*ENGINE_OPTIONS} & {*ENGINE_KEYS}


@pytest.mark.parametrize("name", ENGINE_OPTIONS)
def test_an_option_that_is_tested_is_taken(name: str) -> None:
    values = {"max_model_len": 64, "async_scheduling": True, "enable_prefix_caching": False, "quantization": "fp8"}
    check_engine_options({name: values.get(name, 1)}, "vllm")


@pytest.mark.parametrize("name", ENGINE_KEYS)
def test_an_option_with_a_key_of_its_own_names_it(name: str) -> None:
    with pytest.raises(ValueError, match=rf"engine_options.{name} = 1: cannot be set here: \w+ \w+"):
        check_engine_options({name: 1}, "vllm")


@pytest.mark.parametrize(
    "name",
    [
        *(
            "cpu_offload_gb",
            "return_sampling_mask",
            "ec_transfer_config",
            "enable_dbo",
            "attention_config",
            "model_impl",
        ),
        *("enable_return_routed_experts", "aux_output_config", "compilation_config", "moe_backend", "hf_overrides"),
        *("monokernel", "sleep_mode_backend", "watchdog_config", "_api_process_rank", "scheduler_cls", "enable_lora"),
    ],
)
def test_an_option_that_is_not_tested_is_refused(name: str) -> None:
    """Also one of a later version."""
    with pytest.raises(
        ValueError, match=rf"{name} = 1: cannot be set here: it is not one of the options that are test"
    ):
        check_engine_options({name: 1}, "vllm")


def test_a_misspelt_option_and_a_quantization_that_gets_no_new_weights_are_refused() -> None:
    with pytest.raises(ValueError, match=r"did you mean max_num_batched_tokens\?"):
        check_engine_options({"max_num_batch_tokens": 64}, "vllm")
    with pytest.raises(
        ValueError, match="quantization = 'gptq': cannot be set here: new weights reach an engine with fp8"
    ):
        check_engine_options({"quantization": "gptq"}, "vllm")


def test_another_engine_has_its_own_options() -> None:
    check_engine_options({"max_model_len": 64, "max_num_batched_tokens": 8}, "transformers")
    for options, why in (
        (
            {"enforce_eager": True},
            "with the engine transformers; there are max_model_len, max_num_batched_tokens",
        ),
        ({"max_num_batched_tokens": 0}, "must be a number of tokens, at least 1"),
        ({"max_model_len": 1}, "must be a number of tokens, at least 2"),
    ):
        with pytest.raises(ValueError, match=why):
            check_engine_options(options, "transformers")
    check_engine_options({"anything": 1}, "own.py:Engine")
