"""What a request may say, in OpenAI's words and in Anthropic's.

Invariants: a field or a value that is not honoured is an error that names it, never ignored; how tokens are sampled is
the run's choice, so that they can be trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from hpcrl.rollout.endpoint.session import BadRequest, sampling_params
from hpcrl.rollout.engines.completion import Sampling

Count = Annotated[int, msgspec.Meta(ge=1)]
Text = Annotated[str, msgspec.Meta(min_length=1)]
Zero = Annotated[float, msgspec.Meta(ge=0, le=0)]
Nothing = Annotated[list[Any], msgspec.Meta(max_length=0)]
_AS_THE_RUN = ("temperature", "top_p", "top_k", "min_p")


class _Fields(msgspec.Struct, forbid_unknown_fields=True):
    pass


class _Sampled(_Fields):
    """What requests of both protocols have."""

    model: Any = None
    metadata: Any = None
    service_tier: Any = None
    stream: bool | None = None
    max_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


# ---- OpenAI's


class StreamOptions(_Fields):
    include_usage: bool | None = None


class TextFormat(_Fields):
    type: Literal["text"]


class _Function(msgspec.Struct):
    name: str


class _Tool(msgspec.Struct):
    """The template is shown all of it."""

    type: Literal["function"]
    function: _Function


class OpenAIRequest(_Sampled):
    """What chats and completions have in common."""

    user: Any = None
    store: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    stop: Text | list[Text] | None = None
    stream_options: StreamOptions | None = None
    min_p: float | None = None
    n: Literal[1] | None = None
    frequency_penalty: Zero | None = None
    presence_penalty: Zero | None = None
    logit_bias: Annotated[dict[str, float], msgspec.Meta(max_length=0)] | None = None


class ChatBody(OpenAIRequest, kw_only=True):
    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    tools: list[_Tool] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Literal[0] | None = None
    response_format: TextFormat | None = None
    modalities: list[Literal["text"]] | None = None


class CompletionBody(OpenAIRequest, kw_only=True):
    prompt: Text | Annotated[list[Any], msgspec.Meta(min_length=1)]
    logprobs: Literal[0] | None = None
    best_of: Literal[1] | None = None


# ---- Anthropic's


class TextBlock(_Fields, tag_field="type", tag="text"):
    text: str
    cache_control: Any = None
    citations: Any = None


class ToolUse(_Fields, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    cache_control: Any = None
    caller: Any = None


class ToolResult(_Fields, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    cache_control: Any = None


class UserMessage(_Fields, tag_field="role", tag="user"):
    content: str | list[TextBlock | ToolResult]


class AssistantMessage(_Fields, tag_field="role", tag="assistant"):
    content: str | list[TextBlock | ToolUse]


class OwnTool(_Fields):
    name: str
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None
    cache_control: Any = None


class ToolChoice(_Fields):
    type: Literal["auto", "none"]
    disable_parallel_tool_use: bool | None = None


class Thinking(_Fields):
    type: Literal["disabled"]


class ContextManagement(_Fields):
    edits: Nothing


class MessagesBody(_Sampled, kw_only=True):
    messages: Annotated[list[UserMessage | AssistantMessage], msgspec.Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    stop_sequences: list[Text] | None = None
    tools: list[OwnTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    mcp_servers: Nothing | None = None
    context_management: ContextManagement | None = None


# ---- reading

T = TypeVar("T", bound=msgspec.Struct)


def read(body: Mapping[str, Any], kind: type[T]) -> T:
    """A body as one of these; a field that is null counts as left out.

    Raises:
        BadRequest: names the field that is not as it should be.
    """
    try:
        return msgspec.convert({name: value for name, value in body.items() if value is not None}, kind)
    except (msgspec.ValidationError, OverflowError) as error:
        raise BadRequest(f"this is not served: {error}") from error


def check_sampling(asked: _Sampled, sampling: Sampling) -> None:
    """Raise BadRequest for another sampling than the run's."""
    run = sampling_params(sampling)
    for name in _AS_THE_RUN:
        value = getattr(asked, name, None)
        if value is not None and value != run.get(name):
            raise BadRequest(
                f"{name} {value!r:.80} is not served: the run samples at {run.get(name)}, and tokens that are sampled "
                "otherwise cannot be trained on; leave it out"
            )
