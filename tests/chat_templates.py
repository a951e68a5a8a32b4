"""Chat templates that behave like the documented templates of the main model families."""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, TemplateError

from flashmoa.errors import MalformedRequest

CHATML = """
{%- if tools %}<|im_start|>system
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
LLAMA = """<|begin_of_text|>
{%- for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content | trim }}<|eot_id|>
{%- endfor %}<|start_header_id|>assistant<|end_header_id|>

"""
# Tools and the system prompt come before the last user message, and roles must alternate.
MISTRAL = """
{%- set system = messages[0].content if messages[0].role == "system" else none %}
{%- set rest = messages[1:] if system is not none else messages %}
{%- for m in rest %}
{%- if (m.role == "user") != (loop.index0 % 2 == 0) %}{{ raise_exception("alternate!") }}{% endif %}
{%- if m.role == "user" %}
{%- if loop.last and tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- if loop.last and system is not none %}[INST] {{ system }}

{{ m.content }}[/INST]{% else %}[INST] {{ m.content }}[/INST]{% endif %}
{%- else %} {{ m.content }}</s>{% endif %}
{%- endfor %}"""
# There is no system role: its text is put before the first user message. Roles must alternate, and
# all texts are trimmed.
GEMMA = """<bos>
{%- set system = messages[0].content + "\n\n" if messages[0].role == "system" else "" %}
{%- set rest = messages[1:] if system else messages %}
{%- for m in rest %}
{%- if (m.role == "user") != (loop.index0 % 2 == 0) %}{{ raise_exception("alternate!") }}{% endif %}
<start_of_turn>{{ "model" if m.role == "assistant" else m.role }}
{{ (system if loop.first else "") + (m.content | trim) }}<end_of_turn>
{%- endfor %}
<start_of_turn>model
"""
# Thoughts are removed from the assistant's earlier messages.
DEEPSEEK = """<bos>
{%- for m in messages %}
{%- if m.role == "system" %}{{ m.content }}
{%- elif m.role == "user" %}<User>{{ m.content }}
{%- else %}<Assistant>{{ m.content.split("</think>")[-1] }}<eos>
{%- endif %}
{%- endfor %}<Assistant><think>
"""
GPT_OSS = """<|start|>system<|message|>You are a language model.<|end|>
{%- for m in messages %}
{%- if m.role == "system" %}<|start|>developer<|message|># Instructions

{{ m.content }}<|end|>
{%- elif m.role == "assistant" %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>
{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>
{%- endif %}
{%- endfor %}<|start|>assistant"""
# The assistant's last message after the last user's gets an empty thought, the earlier ones not.
QWEN3 = """
{%- set last = namespace(user=-1) %}
{%- for m in messages %}
{%- if m.role == "user" %}{% set last.user = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == "assistant" and loop.last and loop.index0 > last.user %}<think>

</think>

{% endif %}{{ m.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
<think>

</think>

"""
GLM = """[gMASK]<sop>
{%- for m in messages %}<|{{ m.role }}|>
{%- if m.role == "assistant" %}
<think></think>
{{ m.content | trim }}
{%- else %}
{{ m.content }}
{%- endif %}
{%- endfor %}<|assistant|>
<think></think>"""
TEMPLATES = {
    "chatml": CHATML,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "deepseek": DEEPSEEK,
    "gpt-oss": GPT_OSS,
    "qwen3": QWEN3,
    "glm": GLM,
}
ALTERNATING = {"mistral", "gemma"}


class Renderer:
    """Renders a chat template as an engine does."""

    url = "http://engine"

    def __init__(self, template: str) -> None:
        environment = Environment()
        environment.globals["raise_exception"] = _refuse
        self._template = environment.from_string(template)

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **_: Any,
    ) -> str:
        try:
            return self._template.render(messages=messages, tools=tools)
        except TemplateError as error:
            raise MalformedRequest(str(error), status=400, code="malformed") from error


def _refuse(reason: str) -> None:
    raise TemplateError(reason)
