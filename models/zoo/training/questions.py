"""Prompts for a model that chats: `python -m models.zoo.training.questions FILE`, 2,980 of them.

Each is a task and a subject, so none is anybody's text. A drafter for SmolLM2 (models/published.py)
is distilled on what that writes after them.
"""

import json
import random
import sys
from itertools import product
from pathlib import Path

TASKS = (
    "Write a short story about {}.",
    "Explain {} to a child.",
    "Explain {} to an engineer.",
    "List five facts about {}.",
    "What should I know before I learn about {}?",
    "Write a poem about {}.",
    "Summarise the history of {} in one paragraph.",
    "What are the advantages and the disadvantages of {}?",
    "Give me step by step instructions for a first experience with {}.",
    "Write an e-mail to a colleague about {}.",
    "How does {} work?",
    "Compare {} today with {} a hundred years ago.",
    "Write three questions for an exam about {}, with their answers.",
    "Why do people care about {}?",
    "Write a dialogue between two friends about {}.",
    "Correct my sentence: I has been interested on {} since long.",
    "What is a good title for a book about {}?",
    "Write a Python function that counts words in a text about {}.",
    "Describe {} in the style of a newspaper.",
    "What would happen without {}?",
)
SUBJECTS = """
bridges, honey bees, the Moon, bicycles, bread, volcanoes, chess, the printing press, rivers,
glass, penguins, jazz, the Roman Empire, electric cars, sleep, coffee, vaccines, maps,
lighthouses, robots, the violin, earthquakes, tea ceremonies, photosynthesis, football,
libraries, gravity, wolves, trains, paintings, salt, clouds, the telephone, gardening, whales,
mathematics, pyramids, batteries, dreams, chocolate, deserts, elections, dinosaurs, swimming,
steel, the Internet, mountains, languages, ants, theatre, rice, space travel, money, forests,
the heart, clocks, rain, markets, computers, islands, black holes, horses, antibiotics, cinema,
paper, the Silk Road, tides, friendship, cheese, cathedrals, birds, sailing, coal, cooking,
memory, windmills, tigers, algebra, snow, museums, the ear, wine, radio, marathons, spiders,
democracy, plastic, owls, canals, fire, dance, steam engines, corals, letters, stars, schools,
potatoes, ships, music boxes, probability, soil, recycling, castles, eyes, cities, satellites,
butterflies, poetry, sharks, soap, philosophy, oil, cameras, winter, translation, calendars,
kites, sugar, lightning, the brain, opera, turtles, silk, medicine, tunnels, monkeys, comets,
mirrors, pottery, trust, evolution, umbrellas, cotton, zero, parliaments, bats, ice, gold,
magnets, shadows, fountains, insects, fossils, tomatoes, drums, trees, echoes, laughter,
volunteers
"""


def questions() -> list[str]:
    """All of them, in a fixed order."""
    subjects = SUBJECTS.replace("\n", " ").strip().split(", ")
    pairs = [task.replace("{}", subject) for task, subject in product(TASKS, subjects)]
    random.Random(0).shuffle(pairs)
    return pairs


if __name__ == "__main__":
    lines = [{"messages": [{"role": "user", "content": each}]} for each in questions()]
    Path(sys.argv[1]).write_text("".join(json.dumps(line) + "\n" for line in lines))
