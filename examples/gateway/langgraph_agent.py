"""A program for the gateway with LangGraph: it answers questions with three tools.

pip install langgraph langchain-openai
python -m flowtrain.train --config configs/gateway.toml --model.path runs/warm/model \
    --gateway.function examples/gateway/langgraph_agent.py:solve

Nothing in here knows of training: `solve` works with any endpoint that calls tools.
"""

from __future__ import annotations

from typing import Any

from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from examples.gateway import tools

MAX_TURNS = 5
_TOOLS = [StructuredTool.from_function(tool, name=name) for name, tool in tools.TOOLS.items()]


async def solve(task: Any, base_url: str, api_key: str) -> str:
    """Run the graph until the model writes a message without a call, which is the answer."""
    chat = ChatOpenAI(model="policy", base_url=base_url, api_key=api_key)
    model = chat.bind_tools(_TOOLS)
    num_turns = 0

    async def ask(state: MessagesState) -> dict[str, Any]:
        nonlocal num_turns
        num_turns += 1
        return {"messages": [await model.ainvoke(state["messages"])]}

    def go_on(state: MessagesState) -> str:
        return tools_condition(state) if num_turns < MAX_TURNS else "__end__"

    graph = StateGraph(MessagesState)
    graph.add_node("model", ask)
    graph.add_node("tools", ToolNode(_TOOLS))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", go_on)
    graph.add_edge("tools", "model")
    end = await graph.compile().ainvoke({"messages": [("user", task.question)]})
    last = end["messages"][-1]
    return "" if last.tool_calls else str(last.content)
