"""Dialogues that call tools: one of several, arguments from the request, two at once, and what follows a result."""

from __future__ import annotations

import json
from dataclasses import dataclass
from random import Random

from demo.tasks.copying import random_word
from demo.tasks.sample import Message, Sample, assistant, calls, user
from demo.tasks.words import (
    ADJECTIVES,
    CITIES,
    COLORS,
    DAYS,
    FOODS,
    FRUITS,
    JOBS,
    MONTHS,
    NAMES,
    NOUNS,
    OBJECTS,
)


@dataclass(frozen=True)
class Tool:
    """A tool: parameters as (name, kind, required); kind is a JSON type or the list of an enum's values."""

    name: str
    about: str
    params: tuple[tuple[str, str, bool], ...]
    requests: tuple[str, ...]
    results: tuple[str, ...] = ()
    reply: str = ""


POOLS = {
    "city": CITIES, "name": NAMES, "food": FOODS, "fruit": FRUITS, "job": JOBS, "color": COLORS, "day": DAYS,
    "month": MONTHS, "noun": NOUNS, "object": OBJECTS, "language": ["French", "German", "Spanish", "Italian", "Dutch"],
    "unit": ["celsius", "fahrenheit"], "room": ["kitchen", "bedroom", "hall", "office", "garage", "bathroom"],
    "genre": ["jazz", "rock", "folk", "blues", "pop"], "currency": ["USD", "EUR", "GBP", "JPY", "CHF"],
    "weather": ["sunny", "rainy", "cloudy", "windy", "snowy", "foggy"], "size": ["small", "medium", "large"],
}  # fmt: skip

TOOLS = (
    Tool("get_weather", "Get the weather for a city", (("city", "city", True),),
         ("What is the weather in {city}?", "How is the weather in {city} today?", "Tell me the weather in {city}.",
          "Is it raining in {city}?", "What's the weather like in {city}?"),
         ('{{"weather": "{weather}", "temperature": {n}}}',), "It is {weather} in {city}, {n} degrees."),
    Tool("get_temperature", "Get the temperature of a city", (("city", "city", True), ("unit", "enum:unit", True)),
         ("How warm is it in {city} in {unit}?", "Give me the temperature in {city} in {unit}."),
         ('{{"temperature": {n}}}',), "It is {n} degrees {unit} in {city}."),
    Tool("get_time", "Get the current time in a city", (("city", "city", True),),
         ("What time is it in {city}?", "Tell me the time in {city}."),
         ('{{"time": "{h}:{m}"}}',), "It is {h}:{m} in {city}."),
    Tool("send_email", "Send an email", (("to", "name", True), ("subject", "noun", True)),
         ("Send an email to {to} about the {subject}.", "Email {to} about the {subject}."),
         ('{{"sent": true}}',), "I sent the email to {to}."),
    Tool("send_message", "Send a text message", (("recipient", "name", True), ("text", "food", True)),
         ("Text {recipient} the word {text}.", "Send {recipient} a message that says {text}."),
         ('{{"sent": true}}',), "I sent the message to {recipient}."),
    Tool("set_alarm", "Set an alarm", (("hour", "integer:0:23", True), ("minute", "integer:0:59", True)),
         ("Set an alarm for hour {hour} and minute {minute}.", "Wake me at hour {hour}, minute {minute}."),
         ('{{"ok": true}}',), "The alarm is set."),
    Tool("set_timer", "Start a timer", (("minutes", "integer:1:90", True),),
         ("Set a timer for {minutes} minutes.", "Start a {minutes} minute timer."),
         ('{{"ok": true}}',), "The timer runs for {minutes} minutes."),
    Tool("add", "Add two numbers", (("a", "integer:0:999", True), ("b", "integer:0:999", True)),
         ("Use the tool to add {a} and {b}.", "Add {a} and {b} with the tool."),
         (), ""),
    Tool("multiply", "Multiply two numbers", (("a", "integer:0:99", True), ("b", "integer:0:99", True)),
         ("Use the tool to multiply {a} by {b}.", "Multiply {a} and {b} with the tool."), (), ""),
    Tool("translate", "Translate a word", (("word", "fruit", True), ("language", "enum:language", True)),
         ("Translate {word} into {language}.", "How do you say {word} in {language}?"), (), ""),
    Tool("play_music", "Play music of a genre", (("genre", "enum:genre", True),),
         ("Play some {genre} music.", "I want to hear {genre}."), ('{{"playing": true}}',),
         "Playing {genre} music now."),
    Tool("turn_on_light", "Turn on the light in a room", (("room", "room", True), ("color", "color", False)),
         ("Turn on the light in the {room}.", "Switch on the {room} light."), ('{{"on": true}}',),
         "The light in the {room} is on."),
    Tool("book_table", "Book a table at a restaurant",
         (("city", "city", True), ("people", "integer:1:12", True), ("day", "day", True)),
         ("Book a table in {city} for {people} people on {day}.", "Reserve a table for {people} in {city} on {day}."),
         ('{{"booked": true}}',), "Your table in {city} is booked for {day}."),
    Tool("find_flight", "Find a flight between two cities", (("origin", "city", True), ("destination", "city", True)),
         ("Find a flight from {origin} to {destination}.", "I want to fly from {origin} to {destination}."),
         ('{{"price": {n}}}',), "There is a flight from {origin} to {destination} for {n}."),
    Tool("search", "Search the web", (("query", "noun", True),),
         ("Search the web for {query}.", "Look up {query} on the web."), (), ""),
    Tool("create_event", "Add an event to the calendar", (("title", "food", True), ("day", "day", True)),
         ("Add {title} to my calendar on {day}.", "Put {title} in the calendar for {day}."),
         ('{{"ok": true}}',), "I added {title} on {day}."),
    Tool("order_food", "Order food", (("dish", "food", True), ("quantity", "integer:1:9", True)),
         ("Order {quantity} portions of {dish}.", "I would like {quantity} times {dish}."),
         ('{{"ok": true}}',), "I ordered {quantity} portions of {dish}."),
    Tool("convert_currency", "Convert an amount of money",
         (("amount", "integer:1:5000", True), ("source", "enum:currency", True), ("target", "enum:currency", True)),
         ("Convert {amount} {source} to {target}.", "How much is {amount} {source} in {target}?"), (), ""),
    Tool("get_stock", "Get how many of a thing are in stock", (("item", "object", True), ("size", "enum:size", False)),
         ("How many {item} are in stock?", "Check the stock of {item}."), ('{{"stock": {n}}}',),
         "There are {n} {item}."),
    Tool("find_person", "Find a person by name and job", (("name", "name", True), ("job", "job", True)),
         ("Find {name} the {job}.", "Look for {name}, who is a {job}."), (), ""),
)  # fmt: skip


def schema_of(tool: Tool) -> dict[str, object]:
    """The tool in the form of the OpenAI API."""
    properties: dict[str, object] = {}
    for name, kind, _ in tool.params:
        head, _, rest = kind.partition(":")
        if head == "enum":
            properties[name] = {"type": "string", "enum": POOLS[rest]}
        else:
            properties[name] = {"type": head if head in ("integer", "number", "boolean") else "string"}
    required = [name for name, _, needed in tool.params if needed]
    parameters = {"type": "object", "properties": properties, "required": required}
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.about, "parameters": parameters},
    }


def value_for(rng: Random, kind: str) -> object:
    head, _, rest = kind.partition(":")
    if head == "integer":
        low, high = rest.split(":")
        return rng.randint(int(low), int(high))
    if head == "boolean":
        return rng.random() < 0.5
    return rng.choice(POOLS[rest if head == "enum" else head])


def invented_tool(rng: Random) -> Tool:
    """A tool with made-up names, so that the call has to be read off its description."""
    name = (
        rng.choice(("get", "set", "find", "make", "run", "check"))
        + "_"
        + rng.choice((random_word(rng), *NOUNS))
    )
    kinds = ("city", "name", "integer:0:999", "noun", "boolean", "color", "fruit")
    names = (
        "id",
        "count",
        "target",
        "place",
        "label",
        "value",
        "owner",
        "level",
        random_word(rng),
        random_word(rng),
    )
    params = tuple((n, rng.choice(kinds), True) for n in rng.sample(names, rng.randint(1, 3)))
    spoken = " and ".join(f"{n} {{{n}}}" for n, _, _ in params)
    requests = (f"Use {name} with {spoken}.", f"Call {name} with {spoken}.", f"Please run {name}: {spoken}.")
    return Tool(name, f"{name.split('_')[0].capitalize()} the {name.split('_')[1]}", params, requests)


def pick_tool(rng: Random) -> Tool:
    return invented_tool(rng) if rng.random() < 0.3 else rng.choice(TOOLS)


def fill(rng: Random, tool: Tool) -> tuple[str, dict[str, object]]:
    """A request for the tool and the arguments it asks for."""
    arguments = {name: value_for(rng, kind) for name, kind, needed in tool.params if needed}
    spoken = {n: str(v).lower() if isinstance(v, bool) else v for n, v in arguments.items()}
    return rng.choice(tool.requests).format(**spoken), arguments


def around(rng: Random, *needed: Tool) -> list[dict[str, object]]:
    """The needed tools among up to three others, in any order."""
    names = {tool.name for tool in needed}
    others = [pick_tool(rng) for _ in range(rng.choice((0, 0, 1, 2, 3)))]
    offered = list(needed)
    for tool in others:
        if tool.name not in names:
            names.add(tool.name)
            offered.append(tool)
    rng.shuffle(offered)
    return [schema_of(tool) for tool in offered]


def opening(rng: Random) -> list[Message]:
    texts = ("You are a helpful assistant.", "You can use tools.", "Help the user.")
    return [{"role": "system", "content": rng.choice(texts)}] if rng.random() < 0.3 else []


def one_call(rng: Random) -> Sample:
    tool = pick_tool(rng)
    text, arguments = fill(rng, tool)
    thinking = rng.random() < 0.1
    message = calls((tool.name, arguments))
    if thinking:
        message["reasoning_content"] = f"The tool {tool.name} fits."
    turns = [*opening(rng), user(text), message]
    answer = json.dumps({"name": tool.name, "arguments": arguments})
    return Sample("tool_call", f"{tool.name} {arguments}", turns, around(rng, tool), answer, thinking)


def two_calls(rng: Random) -> Sample:
    first, second = rng.sample(TOOLS, 2)
    (text, one), (more, two) = fill(rng, first), fill(rng, second)
    turns = [*opening(rng), user(f"{text} {more}"), calls((first.name, one), (second.name, two))]
    return Sample("two_calls", f"{one} {two}", turns, around(rng, first, second))


def with_result(rng: Random) -> Sample:
    """Call, result, spoken answer."""
    tool = rng.choice([t for t in TOOLS if t.results])
    text, arguments = fill(rng, tool)
    seen = {"n": rng.randint(1, 99), "h": rng.randint(0, 23), "m": f"{rng.randint(0, 59):02d}"}
    seen["weather"] = rng.choice(POOLS["weather"])
    result, reply = rng.choice(tool.results).format(**seen), tool.reply.format(**{**seen, **arguments})
    done: list[Message] = [{"role": "tool", "content": result}, assistant(reply)]
    turns = [*opening(rng), user(text), calls((tool.name, arguments)), *done]
    if rng.random() < 0.3:
        more, again = fill(rng, tool)
        turns += [user(more), calls((tool.name, again))]
    return Sample("tool_result", f"{tool.name} {arguments} {result}", turns, around(rng, tool), reply)


def no_call(rng: Random) -> Sample:
    """Tools are offered but the request needs none."""
    said, reply = rng.choice(
        (
            ("Hello!", "Hello! How can I help you?"),
            ("Thank you!", "You are welcome!"),
            ("Good morning.", "Good morning! How can I help you?"),
            ("What is 2 + 3?", "2 + 3 = 5"),
            ("Which tools do you have?", "I can use the tools that you gave me."),
        )
    )
    tools = around(rng, pick_tool(rng))
    key = f"{said} {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
    return Sample("no_call", key, [*opening(rng), user(said), assistant(reply)], tools)


MAKERS = {one_call: 6.0, two_calls: 1.0, with_result: 2.5, no_call: 0.7}
