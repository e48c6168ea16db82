"""Word lists from which the generated dialogues draw."""


def _words(text: str) -> list[str]:
    return text.split()


NAMES = _words(
    "Anna Ben Clara David Emma Felix Grace Henry Ida Jack Kate Liam Maria Noah Olivia Paul Rosa Sam Tina "
    "Victor Walter Alice Bruno Cora Daniel Ella Frank Greta Hugo Iris Jonas Klara Leo Mina Nora Oscar "
    "Petra Quentin Ruth Simon Thea Uma Vera Will Xenia Yara Zoe Adam Bella Carl Dora Erik Flora George "
    "Hanna Ivan Julia Kurt Laura Max Nina Otto Paula Robert Sara Tom Ursula Vincent Wendy Arthur Bianca "
    "Cyrus Diana Elias Fiona Gustav Helen Isaac Jane Kevin Lucy Martin"
)
CITIES = _words(
    "Paris London Berlin Madrid Rome Vienna Oslo Cairo Tokyo Lima Delhi Seoul Boston Dublin Prague Athens "
    "Lisbon Sydney Toronto Chicago Munich Zurich Geneva Milan Venice Naples Warsaw Budapest Helsinki "
    "Stockholm Copenhagen Brussels Moscow Nairobi Lagos Havana Quito Bogota Denver Seattle Austin Dallas "
    "Houston Phoenix Hamburg Cologne Lyon Nice Porto Seville Valencia Florence Turin Kyoto Osaka Bangkok "
    "Manila Jakarta Mumbai Karachi Tehran Baghdad Ankara"
)
ADJECTIVES = _words(
    "red blue green old new small large silver golden quiet bright dark heavy round broken hidden "
    "northern southern wooden stone narrow wide warm cold empty tall ancient purple white black yellow "
    "gray crooked secret eastern western frozen rusty gentle noisy sleepy clever proud humble lonely "
    "merry brave polished dusty painted striped"
)
NOUNS = _words(
    "gate tower garden house bridge river box door engine lamp ship key book clock mirror table chair "
    "window castle mill forest island cave barn wagon bell drum cup coin ring crown sword shield basket "
    "kettle candle ladder rope wheel stable market temple harbor tunnel valley meadow orchard fountain "
    "library kitchen cellar attic chapel station warehouse lighthouse cottage palace fortress cabin vault"
)
ANIMALS = _words(
    "fox bear wolf cat dog horse owl rabbit mouse goose duck hen pig goat sheep cow deer frog snake lion "
    "tiger monkey elephant donkey crow swan beaver otter squirrel badger hedgehog turtle whale dolphin "
    "eagle sparrow"
)
FRUITS = _words(
    "apple pear plum cherry peach lemon orange grape banana fig mango melon berry apricot lime kiwi"
)
OBJECTS = _words(
    "apples pears books coins stamps pencils marbles cards eggs shells stones flowers candles buttons "
    "cups boxes bottles tickets letters cookies oranges ribbons keys toys"
)
VERBS = _words(
    "walks runs jumps sings sleeps reads writes cooks paints swims dances waits laughs whispers climbs "
    "digs flies looks"
)
COLORS = _words("red blue green yellow black white purple orange brown pink gray silver gold")
JOBS = _words(
    "baker teacher doctor farmer sailor painter pilot nurse lawyer singer writer carpenter tailor miller "
    "smith gardener engineer driver cook judge actor dentist plumber librarian"
)
MONTHS = _words("January February March April May June July August September October November December")
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
FOODS = _words(
    "bread soup rice pasta pizza salad cheese cake stew noodles curry pancakes toast omelette porridge "
    "dumplings"
)
COUNTRIES = {
    "France": "Paris", "England": "London", "Germany": "Berlin", "Spain": "Madrid", "Italy": "Rome",
    "Austria": "Vienna", "Norway": "Oslo", "Egypt": "Cairo", "Japan": "Tokyo", "Peru": "Lima", "India":
    "New Delhi", "South Korea": "Seoul", "Ireland": "Dublin", "Greece": "Athens", "Portugal": "Lisbon",
    "Poland": "Warsaw", "Hungary": "Budapest", "Finland": "Helsinki", "Sweden": "Stockholm", "Denmark":
    "Copenhagen", "Belgium": "Brussels", "Russia": "Moscow", "Kenya": "Nairobi", "Cuba": "Havana",
    "Canada": "Ottawa", "Australia": "Canberra", "China": "Beijing", "Turkey": "Ankara", "Brazil":
    "Brasilia", "Argentina": "Buenos Aires", "Mexico": "Mexico City", "the United States": "Washington",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "fast": "slow", "old": "young", "happy": "sad", "light": "dark",
    "up": "down", "left": "right", "open": "closed", "rich": "poor", "hard": "soft", "early": "late",
    "full": "empty", "good": "bad", "high": "low", "long": "short", "strong": "weak", "wet": "dry",
    "day": "night", "first": "last",
}  # fmt: skip
SOUNDS = {
    "cow": "moo", "dog": "woof", "cat": "meow", "duck": "quack", "sheep": "baa", "pig": "oink", "horse":
    "neigh", "owl": "hoot", "lion": "roar", "bee": "buzz", "mouse": "squeak", "frog": "croak",
}  # fmt: skip
NUMBER_WORDS = _words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen twenty"
)
SYLLABLES = _words(
    "ba be bi bo bu da de di do du fa fe fi ka ke ki ko la le li lo lu ma me mi mo na ne ni no pa pe pi "
    "po ra re ri ro sa se si so ta te ti to va ve vi vo za zo"
)
