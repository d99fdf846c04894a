# ruff: noqa: RUF001 (DeepSeek's control tokens)
"""Compact chat templates in the published formats of model families that call tools."""

from __future__ import annotations

_N = "{{ '\\n' }}"
_CHATML_END = "{% if add_generation_prompt %}<|im_start|>assistant" + _N + "{% endif %}"

HERMES = (
    "{% if tools %}<|im_start|>system" + _N + "{% for tool in tools %}{{ tool | tojson }}" + _N + "{% endfor %}"
    "<|im_end|>" + _N + "{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}<|im_start|>user" + _N + "<tool_response>" + _N + "{{ m.content }}" + _N
    + "</tool_response><|im_end|>" + _N
    + "{% elif m.role == 'assistant' %}<|im_start|>assistant" + _N
    + "{% set c = (m.content or '').split('</think>')[-1].lstrip('\\n') %}"
    "{% if m.reasoning_content is string and loop.index0 > messages | length - 4 %}<think>" + _N
    + "{{ m.reasoning_content }}" + _N + "</think>" + _N + _N + "{% endif %}{{ c }}"
    "{% for call in m.tool_calls %}{% if c or not loop.first %}" + _N + "{% endif %}<tool_call>" + _N
    + '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}' + _N
    + "</tool_call>{% endfor %}<|im_end|>" + _N
    + "{% else %}<|im_start|>{{ m.role }}" + _N + "{{ m.content }}<|im_end|>" + _N + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant" + _N
    + "{% if enable_thinking is defined and not enable_thinking %}<think>" + _N + _N + "</think>" + _N + _N
    + "{% endif %}{% endif %}"
)  # fmt: skip

QWEN_CODER = (
    "{% if tools %}<|im_start|>system" + _N + "<tools>{% for tool in tools %}<function><name>{{ tool.function.name }}"
    "</name>{% for p, f in tool.function.parameters.properties | items %}<parameter><name>{{ p }}</name>"
    "<type>{{ f.type }}</type></parameter>{% endfor %}</function>{% endfor %}</tools>"
    "<tool_call>" + _N + "<function=example>" + _N + "<parameter=x>" + _N + "<|im_end|>" + _N + "{% endif %}"
    "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}" + _N
    + "{% if m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>"
    "{% else %}{{ m.content or '' }}{% endif %}"
    "{% for call in m.tool_calls %}{% if m.content or not loop.first %}" + _N + "{% endif %}<tool_call>" + _N
    + "<function={{ call.function.name }}>" + _N
    + "{% for k, v in call.function.arguments | items %}<parameter={{ k }}>" + _N
    + "{{ v if v is string else v | tojson }}" + _N + "</parameter>" + _N
    + "{% endfor %}</function>" + _N + "</tool_call>{% endfor %}<|im_end|>" + _N + "{% endfor %}" + _CHATML_END
)  # fmt: skip

#: Writes one call, or tools' results as JSON, as Llama 3.1's.
LLAMA = (
    "{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>"
    + 2 * _N + "{% if m.role == 'user' and loop.last and tools %}{% for tool in tools %}{{ tool | tojson(indent=4) }}"
    "{% endfor %}<|python_tag|>? {{ m.content }}"
    "{% elif m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one call only') }}{% endif %}"
    "{% set f = m.tool_calls[0].function %}"
    '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
    "{% elif m.role == 'tool' %}{% if m.content is iterable %}{{ m.content | tojson }}{% endif %}"
    "{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>" + _N + _N + "{% endif %}"
)  # fmt: skip

_MISTRAL = (
    "{% set s = namespace(last='assistant') %}{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system first') }}{% endif %}"
    "{% if m.role == s.last and m.role == 'user' %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set s.last = m.role %}"
    "{% if m.role == 'user' %}{% if tools and loop.last %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]"
    "{% endif %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{% elif m.tool_calls %}{% for c in m.tool_calls %}{% if c.id is not defined or c.id | length != 9 %}"
    "{{ raise_exception('ids have nine characters') }}{% endif %}{% endfor %}CALLS</s>"
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
MISTRAL = _MISTRAL.replace(
    "CALLS",
    '[TOOL_CALLS] [{% for c in m.tool_calls %}{"name": "{{ c.function.name }}", "arguments": '
    '{{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}{% if not loop.last %}, {% endif %}{% endfor %}]',
)
NEW_MISTRAL = _MISTRAL.replace(
    "CALLS",
    "{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}",
)

GLM = (
    "[gMASK]<sop>{% if tools %}<|system|>" + _N + "<tools>{% for tool in tools %}{{ tool.function | tojson }}"
    "{% endfor %}</tools><tool_call><arg_key><arg_value>{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>" + _N + "{{ m.content }}"
    "{% elif m.role == 'tool' %}<|observation|>" + _N + "<tool_response>{{ m.content }}</tool_response>"
    "{% elif m.role == 'system' %}<|system|>" + _N + "{{ m.content }}"
    "{% else %}<|assistant|>" + _N + "{{ m.content or '' }}"
    "{% for c in m.tool_calls %}{% if m.content or not loop.first %}" + _N
    + "{% endif %}<tool_call>{{ c.function.name }}" + _N
    + "{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>" + _N
    + "<arg_value>{{ v if v is string else v | tojson }}</arg_value>" + _N
    + "{% endfor %}</tool_call>{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>" + _N + "{% endif %}"
)  # fmt: skip

#: As of V3 and R1: arguments are text, a content beside calls is None, thoughts are cut.
DEEPSEEK = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% elif m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'tool' %}<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
    "<｜tool▁outputs▁end｜>"
    "{% elif m.tool_calls %}<｜Assistant｜>{% if m.content is not none %}{{ m.content + '' }}{% endif %}"
    "<｜tool▁calls▁begin｜>{% for c in m.tool_calls %}{% if not loop.first %}" + _N + "{% endif %}"
    "{{ '<｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>' + c.function.name + '\\n```json\\n' + c.function.arguments"
    " + '\\n```<｜tool▁call▁end｜>' }}{% endfor %}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
    "{% else %}<｜Assistant｜>{{ m.content.split('</think>')[-1] }}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜><think>" + _N + "{% endif %}"
)  # fmt: skip

#: As of V3.1.
NEW_DEEPSEEK = (
    "{% for tool in tools or [] %}{{ tool.function.name }}: {{ tool.function.description }} "
    "{{ tool.function.parameters | tojson }}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% elif m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
    "{% else %}<｜Assistant｜></think>{{ m.content or '' }}{% if m.tool_calls %}<｜tool▁calls▁begin｜>"
    "{% for c in m.tool_calls %}<｜tool▁call▁begin｜>{{ c.function.name }}<｜tool▁sep｜>"
    "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}"
    "<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>{% endif %}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{{ '<think>' if thinking else '</think>' }}{% endif %}"
)

#: As of gpt-oss.
HARMONY = (
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}<|end|>"
    "{% if tools or messages[0].role in ('developer', 'system') %}<|start|>developer<|message|>"
    "{% if messages[0].role in ('developer', 'system') %}{{ messages[0].content }}{% endif %}"
    "{% for tool in tools or [] %}// {{ '' + tool.function.description }}" + _N + "type {{ tool.function.name }} = "
    "{% for p, f in tool.function.parameters.properties.items() %}{{ p }}"
    "{{ '' if p in (tool.function.parameters.required or []) else '?' }}: {{ f.type }}, {% endfor %}"
    "{% endfor %}<|end|>{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>"
    "{% elif m.role == 'tool' %}<|start|>functions.{{ m.name }} to=assistant<|channel|>commentary<|message|>"
    "{{ m.content | tojson }}<|end|>"
    "{% elif m.role == 'assistant' %}"
    "{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('not both') }}{% endif %}"
    "{% set t = m.thinking or (m.content if m.tool_calls else '') %}"
    "{% if t and loop.index0 > messages | length - 4 %}<|start|>assistant<|channel|>analysis<|message|>{{ t }}<|end|>"
    "{% endif %}"
    "{% for c in m.tool_calls %}<|start|>assistant<|channel|>commentary to=functions.{{ c.function.name }} "
    "<|constrain|>json<|message|>{{ c.function.arguments | tojson }}<|call|>{% endfor %}"
    "{% if not m.tool_calls %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)  # fmt: skip

#: Sorts parameters, and writes arguments of its own form, as of Gemma's models for tools.
GEMMA = (
    "{% for tool in tools or [] %}<start_function_declaration>{{ tool.function.name }}"
    "{% for p, f in tool.function.parameters.properties | dictsort %}{{ p }}:{{ f.type | upper }},{% endfor %}"
    "<end_function_declaration>{% endfor %}"
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "<start_of_turn>{{ m.role }}" + _N + "{{ m.content or '' }}{% for c in m.tool_calls %}"
    "<start_function_call>call:{{ c.function.name }}{{ '{' }}"
    "{% for k, v in c.function.arguments | dictsort %}{{ k }}:"
    "{% if v is string %}<escape>{{ v }}<escape>{% else %}{{ v }}{% endif %}{{ '' if loop.last else ',' }}{% endfor %}"
    "{{ '}' }}<end_function_call>{% endfor %}<end_of_turn>" + _N + "{% endfor %}"
)  # fmt: skip

ALL = {
    "hermes": HERMES,
    "qwen_coder": QWEN_CODER,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "new mistral": NEW_MISTRAL,
    "glm": GLM,
    "deepseek": DEEPSEEK,
    "new deepseek": NEW_DEEPSEEK,
    "harmony": HARMONY,
    "gemma": GEMMA,
}
