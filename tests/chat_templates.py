"""Chat templates in the manner of published ones, and the special tokens of some."""

from __future__ import annotations

EACH = "{% for m in messages %}"
IF_ASKED = "{% endfor %}{% if add_generation_prompt %}"
CHATML = (
    EACH + "{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }} {{ c.function.arguments | tojson }}"
    "{% endfor %}{{ '<|im_end|>\n' }}" + IF_ASKED + "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Writes what the assistant thought after the user's last message alone, as Qwen3's and GLM-4.5's.
LAST = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
THOUGHT = "{{ '<think>' + m.reasoning_content + '</think>' if m.reasoning_content and loop.index0 > ns.last else '' }}"  # noqa: E501
QWEN3 = (
    LAST
    + CHATML.replace("(m.content or '')", "'' }}" + THOUGHT + "{{ m.content or ''")
    + "{{ '<think></think>' if add_generation_prompt and enable_thinking is false else '' }}"
)
GLM = (
    LAST + "[gMASK]<sop>{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + EACH +
    "{% if m.role == 'tool' %}<|observation|>\n{{ m.content }}{% elif m.role == 'assistant' %}"
    "{{ '<|assistant|>\n' }}" + THOUGHT + "{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function.name }}{% for key, value in c.function.arguments.items() %}"
    "<arg>{{ key }}={{ value }}</arg>{% endfor %}</tool_call>{% endfor %}"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}"
    + IF_ASKED + "{{ '<|assistant|>\n' }}{% endif %}"
)  # fmt: skip
MARKED_GLM = GLM.replace(
    "{{ m.content or '' }}", "{% generation %}{{ m.content }}{% endgeneration %}"
)
LLAMA3 = (
    "<|bos|>" + EACH + "{{ '<|start_header|>' + m.role + '<|end_header|>\n\n' }}"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content }}"
    "{% endif %}<|eot|>"
    + IF_ASKED
    + "{{ '<|start_header|>assistant<|end_header|>\n\n' }}{% endif %}"
)
PHI3 = (
    EACH + "{% if m.role == 'assistant' %}<|assistant|>\n{{ m.content + '<|end|>\n' }}"
    "{% else %}<|user|>\n{{ m.content + '<|end|>\n' }}{% endif %}"
    + IF_ASKED + "{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)  # fmt: skip
MARKED_PHI3 = PHI3.replace(
    "{{ m.content + '<|end|>\n' }}",
    "{% generation %}{{ m.content }}{% endgeneration %}<|end|>\n",
    1,
)
MISTRAL = (
    "<s>" + EACH + "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
GEMMA = (
    "<bos>" + EACH + "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content }}<end_of_turn>\n" + IF_ASKED + "<start_of_turn>model\n{% endif %}"
)
DEEPSEEK = (
    EACH + "{% if m.role == 'user' %}{{ '<User>' + m.content }}{% elif m.role == 'tool' %}"
    "{{ '<Output>' + m.content }}{% else %}{{ '<Assistant>' + (m.content or '') }}"
    "{% for c in m.tool_calls or [] %}{{ '<Call>' + c.type + c.function.name + '\n' + "
    "c.function.arguments }}{% endfor %}<eos>{% endif %}"
    + IF_ASKED + "{{ '<Assistant>' }}{% endif %}"
)  # fmt: skip
TEXT_ALONE = EACH + "{{ m.role + ': ' + m.content + '\n' }}" + IF_ASKED + "assistant: {% endif %}"

GLM_SPECIALS = "[gMASK] <sop> <|user|> <|assistant|> <|observation|> <|system|> </tool_call>"
PHI_SPECIALS = "<|user|> <|assistant|> <|end|>"
