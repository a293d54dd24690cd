"""Rollouts: sampling parameters, chat templates and turns."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from skyrl.config.inference import InferenceEngineConfig
from skyrl.config.machinery.base import BaseConfig
from skyrl.config.machinery.fields import Fraction, one_of
from skyrl.config.machinery.uses import JAX, of_trainers, refused
from skyrl.config.rules.renames import from_flat_generator

OF_SAMPLES = of_trainers("clients of a server send it with each sample; leave it out")


def _top_k(count: int) -> int:
    if count == -1 or count >= 1:
        return count
    raise ValueError("give a number of tokens from 1, or -1 for all")


@dataclass
class SamplingParams(BaseConfig):
    """Sampling of tokens."""

    max_generate_length: PositiveInt = 1024
    """Maximum number of tokens of one response."""

    repetition_penalty: PositiveFloat = 1.0
    """Penalty for tokens that the prompt or the response so far contains. Their positive logits are divided by it,
    negative logits are multiplied by it. 1: no penalty."""

    temperature: NonNegativeFloat = 1.0
    """Divisor of logits. 0: the most likely token."""

    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample only from the most likely tokens whose cumulative probability reaches this value. 1: all tokens."""

    min_p: Fraction = 0.0
    """Minimum probability of tokens to sample, as a fraction of the probability of the most likely token."""

    top_k: Annotated[int, AfterValidator(_top_k)] = -1
    """Sample only from this number of most likely tokens. -1: all."""

    logprobs: Annotated[int, Field(ge=0, le=1)] | None = 1
    """0 or 1: record the log-probabilities of sampled tokens. None: do not record them."""

    stop: list[str] | None = None
    """Strings that end a response."""

    additional_kwargs: dict[str, Any] | None = None
    """More options, with vLLM's names: min_tokens, stop_token_ids, presence_penalty, frequency_penalty."""


@dataclass
class EvalSamplingParams(SamplingParams):
    """Sampling of tokens in evaluation. By default, it is greedy, and the maximum length is that of training."""

    max_generate_length: PositiveInt | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """Maximum number of tokens of one response. None: generator.sampling_params.max_generate_length."""

    temperature: NonNegativeFloat = 0.0
    """Divisor of logits. 0: the most likely token."""


@dataclass
class ChatTemplateConfig(BaseConfig):
    """The template that turns messages into text."""

    source: Annotated[str, one_of("name", "file")] = "name"
    """Meaning of name_or_path: the name of a template, or a file."""

    name_or_path: str | None = None
    """Name (qwen3_with_thinking, qwen3_without_thinking) or path. None: the tokenizer's own template."""

    def problems(self) -> Iterator[str]:
        if self.source == "file" and self.name_or_path is None:
            yield "source=file and name_or_path=None: there is no file; set name_or_path, or source=name"


@dataclass
class GeneratorConfig(BaseConfig):
    """Generation of rollouts."""

    inference_engine: Annotated[
        InferenceEngineConfig,
        refused("the policy samples in the trainer's own process, and there are no vLLM engines; leave it out", JAX),
    ] = field(default_factory=InferenceEngineConfig)
    """Inference engines. They sample the responses."""

    n_samples_per_prompt: PositiveInt = 5
    """Number of samples of each prompt in training."""

    batched: bool = False
    """Start all samples of a batch at once, without any concurrency limit. Single-turn only."""

    max_turns: PositiveInt = 1
    """Maximum number of turns of a conversation. It replaces the limits of rows and environments."""

    max_input_length: PositiveInt | None = None
    """Maximum number of tokens in the input of a turn. None: trainer.max_prompt_length plus, for each earlier turn,
    another max_prompt_length (for the observation) and max_generate_length (for the response)."""

    chat_template: ChatTemplateConfig = field(default_factory=ChatTemplateConfig)
    """The template that turns messages into text."""

    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables that the chat template receives."""

    sampling_params: Annotated[SamplingParams, OF_SAMPLES] = field(default_factory=SamplingParams)
    """Sampling of tokens in training."""

    use_conversation_multi_turn: bool = True
    """Make each turn a separate message. False: one assistant message contains all turns."""

    append_eos_token_after_stop_str_in_multi_turn: bool = True
    """Append the end-of-sequence token to a turn that ended at a stop string."""

    eval_sampling_params: Annotated[SamplingParams | None, OF_SAMPLES] = field(
        default=None, metadata={"base": EvalSamplingParams}
    )
    """Sampling of tokens in evaluation. None: greedy decoding with the max_generate_length of sampling_params."""

    eval_n_samples_per_prompt: PositiveInt = 1
    """Number of samples of each prompt in evaluation."""

    zero_reward_on_non_stop: bool = False
    """Set the reward to 0 for responses that did not end with a stop token or stop string."""

    apply_overlong_filtering: bool = False
    """Exclude responses from the loss if they did not end with a stop token or stop string."""

    rope_scaling: Annotated[
        dict[str, Any] | None,
        of_trainers("a server samples with the weights that it trains; set trainer.rope_scaling alone"),
    ] = None
    """Scaling of rotary embeddings in the engines. None: trainer.rope_scaling."""

    rope_theta: Annotated[
        PositiveFloat | None,
        of_trainers("a server samples with the weights that it trains; set trainer.rope_theta alone"),
    ] = None
    """Base of rotary embeddings in the engines. None: trainer.rope_theta."""

    step_wise_trajectories: bool = False
    """Make each turn a separate training sequence."""

    trajectory_timeout_s: PositiveFloat | None = 3600.0
    """Time limit in seconds for one attempt at a trajectory, including sampling. None: no limit."""

    trajectory_retries: NonNegativeInt = 2
    """Maximum number of retries of a failed trajectory. Each retry has a fresh environment."""

    retry_with_new_seed: bool = True
    """Use new seeds when a trajectory is retried. False: if seeds are set, the retry uses the same seeds and thus
    samples the same tokens."""

    env_error_reward: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """Reward of a turn in which the environment's `step` raised an exception. The trajectory ends with this turn. None:
    the attempt fails. Errors that do not depend on the model's output (EnvError, OSError, timeouts) always fail it."""

    max_failed_fraction: Fraction = 0.1
    """Maximum fraction of a batch's trajectories that may fail after all retries. Failed trajectories are dropped;
    above this fraction, the run stops."""

    max_concurrent_trajectories: PositiveInt | None = None
    """Maximum concurrent trajectories. None: no limit."""

    trajectories_per_second: Annotated[float, Field(ge=1)] | None = None
    """Rate limit for starting trajectories; also the maximum burst size. None: no limit."""

    generator_class: str | None = None
    """Class that produces and rewards trajectories, as module:Class, in place of environments. It must be a subclass of
    skyrl.train.rollouts.generators.generator.Generator. None: environments do this."""

    @classmethod
    def translate(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        return from_flat_generator(given)

    def derive(self) -> None:
        if self.eval_sampling_params is None:
            self.eval_sampling_params = EvalSamplingParams()
        evaluation = self.eval_sampling_params
        if isinstance(evaluation, EvalSamplingParams) and evaluation.max_generate_length is None:
            evaluation.max_generate_length = self.sampling_params.max_generate_length

    def problems(self) -> Iterator[str]:
        yield from self._batched_problems()
        if not self.step_wise_trajectories:
            return
        if self.chat_template.name_or_path is not None:
            yield (
                f"step_wise_trajectories=True and chat_template.name_or_path={self.chat_template.name_or_path}: steps "
                "are rendered with the tokenizer's own template; leave the template out"
            )
        if not self.use_conversation_multi_turn:
            yield (
                "step_wise_trajectories=True and use_conversation_multi_turn=False: each step is a message of its own; "
                "set use_conversation_multi_turn=True"
            )

    def _batched_problems(self) -> Iterator[str]:
        if not self.batched and not self.inference_engine.async_engine:
            yield (
                "batched=False and inference_engine.async_engine=False: such an engine takes whole batches only; set "
                "batched=True, or async_engine=True"
            )
        if not self.batched:
            return
        for name in ("step_wise_trajectories", "chat_template_kwargs", "zero_reward_on_non_stop"):
            value = getattr(self, name)
            if value:
                yield f"batched=True and {name}={value}: batches have no such thing; set one of them to False"
        for name in ("max_concurrent_trajectories", "trajectories_per_second"):
            if (value := getattr(self, name)) is not None:
                yield f"batched=True and {name}={value}: a batch begins at once; set batched=False, or leave {name} out"
        if self.max_turns > 1:
            yield f"batched=True, max_turns={self.max_turns}: a batch has one turn; set batched=False, or max_turns=1"

    def cautions(self) -> Iterator[str]:
        stop = self.sampling_params.stop
        if stop and self.use_conversation_multi_turn and not self.append_eos_token_after_stop_str_in_multi_turn:
            yield (
                f"sampling_params.stop={stop} with append_eos_token_after_stop_str_in_multi_turn=False leaves turns "
                "without an end-of-sequence token, unlike what the chat template renders"
            )
