"""A small MCP server:  python examples/mcp_server.py [port]

Without a port it speaks over stdin and stdout; with one over streamable HTTP at
http://127.0.0.1:PORT/mcp.
"""

import sys

from mcp.server import MCPServer
from mcp_types import ToolAnnotations

AREAS = {"Chad": 1284, "Mali": 1240, "Niger": 1267}
server = MCPServer("areas")


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def area(country: str) -> str:
    """Tells the area of a country in thousands of square kilometres."""
    return f"The area of {country} is {AREAS[country]}."


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def total(numbers: list[float], times: int = 1) -> str:
    """Adds numbers up, several times if asked to."""
    return f"{sum(numbers) * times:g}"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
