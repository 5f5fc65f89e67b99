"""Options of sampling and prompts that more than one command takes."""

from typing import Annotated

from llmbench.cli.options import option

SAMPLING = "Sampling"

SkipChatTemplate = Annotated[
    bool, option(SAMPLING, "--skip-chat-template", help="Send the prompt as it stands.")
]
Temperature = Annotated[float, option(SAMPLING, "--temperature", help="0 is greedy.")]
TopP = Annotated[
    float, option(SAMPLING, "--top-p", help="Draw among the likeliest tokens of this mass.")
]
TopK = Annotated[
    int, option(SAMPLING, "--top-k", help="Draw among this many likeliest tokens; 0 is all.")
]
MinP = Annotated[
    float, option(SAMPLING, "--min-p", help="Drop tokens below this share of the likeliest.")
]
Stop = Annotated[
    list[str] | None, option(SAMPLING, "--stop", help="End at this text. May be repeated.")
]
