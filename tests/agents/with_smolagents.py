"""Checks of agents of `smolagents`. Their adapters, `given.code` and `given.tool`, answer with a final answer."""

from types import SimpleNamespace

from checks import FINAL, KEY, run, same
from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent
from smolagents.agents import EMPTY_PROMPT_TEMPLATES

PROMPTS = EMPTY_PROMPT_TEMPLATES | {"system_prompt": "Write code between <code> and </code>, and call final_answer."}
"""Short ones: the adapters are taught on what the agents send."""
TASK = "What is the capital of Peru?"


def model_of(given: SimpleNamespace, path: str, **options) -> OpenAIModel:
    address = f"{given.url}/sessions/{given.session}/v1"
    return OpenAIModel(path, api_base=address, api_key=KEY, temperature=0, max_tokens=120, **options)


def code_agent(given: SimpleNamespace) -> None:
    """A CodeAgent ends with the final answer of the program that the model writes."""
    agent = CodeAgent(
        tools=[], prompt_templates=PROMPTS, model=model_of(given, given.code), max_steps=1, verbosity_level=0
    )
    same(agent.run(TASK), FINAL)


def code_agent_of_streams(given: SimpleNamespace) -> None:
    """A CodeAgent that reads streams ends with the same answer."""
    model = model_of(given, given.code)
    agent = CodeAgent(
        tools=[], prompt_templates=PROMPTS, model=model, max_steps=1, verbosity_level=0, stream_outputs=True
    )
    same(agent.run(TASK), FINAL)


def tool_calling_agent(given: SimpleNamespace) -> None:
    """A ToolCallingAgent, with `tool_choice="auto"`, ends with the final answer of the call that the model makes."""
    model = model_of(given, given.tool, tool_choice="auto")
    agent = ToolCallingAgent(tools=[], prompt_templates=PROMPTS, model=model, max_steps=1, verbosity_level=0)
    same(agent.run(TASK), FINAL)


if __name__ == "__main__":
    run([code_agent, code_agent_of_streams, tool_calling_agent])
