"""The engine: one vLLM, fed with token ids, whose weights the trainer replaces while it runs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch

from molt.rollout.spec import EngineOptions, InFlight
from molt.rollout.weights import Manifest
from molt.types import Generation, Sampling

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")

RECEIVER = "molt.rollout.receiver.WeightReceiver"

PAUSES: dict[InFlight, tuple[Literal["keep", "wait", "abort"], bool]] = {
    "recompute": ("keep", True),
    "wait": ("wait", True),
    "abort": ("abort", True),
    "keep": ("keep", False),
}
"""vLLM's way to pause, and whether it clears its caches."""


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """An engine's confirmation that it serves new weights."""

    version: int
    """Policy version that it serves now."""
    digest: str
    """Digest of the tensors that it read."""
    num_tensors: int
    """Number of the tensors that it read."""


def engine_env(options: EngineOptions) -> dict[str, str]:
    """Return the environment variables that an engine's process must start with."""
    env = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONWARNINGS": "ignore",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if torch.cuda.is_available():
        return env
    # Without dynamo, ranking the log-probs is not compiled by a C++ compiler at the first request.
    env |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    if options.tensor_parallel == 1:
        # Despite its name it only keeps the worker inside the engine core's process.
        return env | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    # Otherwise the workers of all engines would be bound to the same first cores.
    return env | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}


class Engine:
    """Samples from one version of the policy at a time, and says which one for every token.

    It starts with weights of no meaning and refuses to generate until a load gave it a version.
    Made an actor by the pool; all methods run in one event loop.

    Args:
        model: Folder of the Hugging Face model; only its configuration is read.
        options: Size and limits.
        dtype: Precision of the weights where ``options.dtype`` is null.
        seed: Seed of whatever a request's own seed does not decide.
    """

    def __init__(self, model: str, options: EngineOptions, dtype: str, seed: int) -> None:
        self._model = model
        self._options = options
        self._dtype = options.dtype or dtype
        self._seed = seed
        self._vllm: AsyncLLM | None = None
        self._version = -1
        self._fault = ""
        self._open = asyncio.Event()  # cleared while the weights are replaced
        self._open.set()

    async def start(self) -> dict[str, int]:
        """Start vLLM and say what it is: process id, vocabulary and context length."""
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        args = AsyncEngineArgs(**self._engine_args())
        self._vllm = AsyncLLM.from_engine_args(args)
        return {
            "pid": os.getpid(),
            "vocab_size": self._vllm.model_config.get_vocab_size(),
            "max_model_len": self._vllm.model_config.max_model_len,
        }

    async def generate(
        self, request_id: str, token_ids: list[int], sampling: Sampling, seed: int
    ) -> Generation:
        """Sample one continuation; a cancelled call frees its place in the engine.

        Where new weights cut it into parts, it is put together again: no token is lost.

        Args:
            request_id: Unique among the requests in flight.
            token_ids: [T] the whole context so far.
            sampling: How to sample.
            seed: The same seed and context give the same tokens under the same weights.

        Raises:
            RuntimeError: No version was loaded yet, or a failed load left no usable weights.
        """
        generation = await self._sample(request_id, token_ids, sampling, seed)
        while generation.finish_reason == "abort":
            done = len(generation.token_ids)
            rest = replace(sampling, max_tokens=sampling.max_tokens - done)
            # With the same seed the rest would be drawn with the numbers of the beginning.
            context = token_ids + generation.token_ids
            generation = _join(
                generation, await self._sample(request_id, context, rest, seed + done)
            )
        return generation

    async def load_weights(
        self, manifest: Manifest, version: int, timeout_s: float, in_flight: InFlight = "recompute"
    ) -> Receipt:
        """Replace the weights; requests that come in meanwhile are held back.

        A refused load (names, shapes or digest differ) leaves the version that was served before.
        A load that broke off, or took too long, may have left anything: the engine then stays
        paused and refuses to generate.

        Args:
            manifest: What the trainer published.
            version: The policy version that it is.
            timeout_s: Most seconds until the new version is served.
            in_flight: What becomes of the requests in flight.

        Raises:
            RuntimeError: The load was refused, broke off or took too long.
        """
        self._usable()
        report: dict[str, Any] = {}
        self._open.clear()
        try:
            async with asyncio.timeout(timeout_s):
                report = await self._swap(manifest, version, in_flight)
        except TimeoutError as error:
            message = f"the engine did not load version {version} within {timeout_s:g} s"
            raise RuntimeError(message) from error
        finally:
            # Whatever ended the load before its report, the weights are not to be generated with.
            if not report:
                self._fault = f"its load of version {version} did not end well"
            self._open.set()
        if report["problem"]:
            kept = f"version {self._version}" if self._version >= 0 else "no version"
            raise RuntimeError(
                f"the engine refused version {version} and serves {kept}: {report['problem']}"
            )
        return Receipt(version=version, digest=report["digest"], num_tensors=report["num_tensors"])

    async def health(self) -> None:
        """Raise when the engine cannot serve."""
        await self._usable().check_health()

    async def shutdown(self) -> None:
        """Stop vLLM and its processes."""
        if self._vllm is not None:
            self._vllm.shutdown()
            self._vllm = None

    async def _sample(
        self, request_id: str, token_ids: list[int], sampling: Sampling, seed: int
    ) -> Generation:
        """Sample until the end, or until new weights abort the request."""
        from vllm.inputs import tokens_input

        await self._open.wait()
        engine = self._usable()
        if self._version < 0:
            raise RuntimeError("the engine has no weights of the policy yet")
        # Cached keys and values are found by this name, and so never under another version.
        prompt = tokens_input(token_ids, cache_salt=f"version {self._version}")
        final = None
        async for output in engine.generate(prompt, _sampling_params(sampling, seed), request_id):
            final = output
        if final is None:
            raise RuntimeError(f"vLLM ended request {request_id} without an output")
        return _generation(final.outputs[0], sampling.top_logprobs)

    async def _swap(self, manifest: Manifest, version: int, in_flight: InFlight) -> dict[str, Any]:
        engine = self._core()
        mode, clear_cache = PAUSES[in_flight]
        await self._call(engine.pause_generation(mode=mode, clear_cache=clear_cache))
        rpc = engine.collective_rpc("receive_weights", args=(manifest.to_json(),))
        reports = await self._call(rpc)
        problems = [report["problem"] for report in reports if report["problem"]]
        if problems and len(problems) < len(reports):
            raise RuntimeError(f"only some of the engine's workers loaded: {problems[0]}")
        if not problems:
            await self._call(engine.update_weight_version(str(version)))
            self._version = version
        await self._call(engine.resume_generation())
        return reports[0]

    async def _call(self, operation: Coroutine[Any, Any, T]) -> T:
        """Await a control call, which vLLM never answers once its core has died."""
        from vllm.v1.engine.exceptions import EngineDeadError

        task = asyncio.ensure_future(operation)
        try:
            while not (await asyncio.wait({task}, timeout=0.2))[0]:
                if self._core().errored:
                    raise EngineDeadError
            return task.result()
        finally:
            task.cancel()

    def _core(self) -> AsyncLLM:
        if self._vllm is None:
            raise RuntimeError("the engine is not running")
        return self._vllm

    def _usable(self) -> AsyncLLM:
        if self._fault:
            raise RuntimeError(f"the engine cannot be used any more: {self._fault}")
        return self._core()

    def _engine_args(self) -> dict[str, Any]:
        options = self._options
        args: dict[str, Any] = {
            "model": self._model,
            "dtype": self._dtype,
            "seed": self._seed,
            "max_model_len": options.max_model_len,
            "max_num_seqs": options.max_num_seqs,
            "tensor_parallel_size": options.tensor_parallel,
            "kv_cache_memory_bytes": int(options.kv_cache_gib * 2**30),
            # The probabilities that were sampled from: after the temperature.
            "logprobs_mode": "processed_logprobs",
            "max_logprobs": -1,
            "worker_extension_cls": RECEIVER,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "disable_log_stats": True,
        }
        if not torch.cuda.is_available():
            args |= {
                "enforce_eager": True,
                # The default of 128 would share no prefix shorter than that.
                "block_size": 32,
                "gpu_memory_utilization": 0.1,
                # A prompt cut in two rewinds the request's generator, which a CPU one cannot do.
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": max(options.max_model_len, 4096),
            }
            if options.tensor_parallel == 1:
                args["distributed_executor_backend"] = "uni"
        return args | options.engine_args


def _sampling_params(sampling: Sampling, seed: int) -> SamplingParams:
    """Spell every field out, so that neither vLLM's nor the model's defaults shape the policy."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        n=1,
        temperature=sampling.temperature,
        max_tokens=sampling.max_tokens,
        min_tokens=0,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=False,
        top_p=1.0,
        top_k=-1,
        min_p=0.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        seed=seed,
        logprobs=sampling.top_logprobs,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _join(first: Generation, second: Generation) -> Generation:
    return Generation(
        token_ids=first.token_ids + second.token_ids,
        logprobs=first.logprobs + second.logprobs,
        policy_versions=first.policy_versions + second.policy_versions,
        finish_reason=second.finish_reason,
        top_ids=first.top_ids + second.top_ids,
        top_logprobs=first.top_logprobs + second.top_logprobs,
    )


def _generation(output: CompletionOutput, num_top: int) -> Generation:
    token_ids = list(output.token_ids)
    versions = [-1] * len(token_ids)
    for span in output.weight_versions or []:
        versions[span.start : span.end] = [int(span.version)] * (span.end - span.start)
    if output.logprobs is None:
        raise RuntimeError("vLLM returned tokens without log-probs")
    logprobs = []
    for token, entry in zip(token_ids, output.logprobs, strict=True):
        assert entry is not None  # every sampled token has one; only prompt tokens may lack it
        # Rounding can lift the log-prob of a certain token a hair above 0.
        logprobs.append(min(entry[token].logprob, 0.0))
    # The sampled token comes first, whether or not it is one of the likeliest.
    top = [[*entry.items()][-num_top:] for entry in output.logprobs if entry and num_top]
    return Generation(
        token_ids=token_ids,
        logprobs=logprobs,
        policy_versions=versions,
        finish_reason=str(output.finish_reason),
        top_ids=[[token for token, _ in row] for row in top],
        top_logprobs=[[known.logprob for _, known in row] for row in top],
    )
