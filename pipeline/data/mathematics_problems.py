"""The kinds of problems of `mathematics`: each draws a question, its worked steps, the answer."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from random import Random
from typing import NamedTuple


class Problem(NamedTuple):
    question: str
    steps: list[str]
    answer: str


class Kind(NamedTuple):
    title: str
    make: Callable[[Random], Problem]


NAMES = (
    *("Ada", "Ben", "Carla", "Dmitri", "Elena", "Farid", "Grace", "Hana", "Ivan", "Julia"),
    *("Kofi", "Lena", "Maria", "Noor", "Omar", "Priya", "Quinn", "Rosa", "Samir", "Zoe"),
)
GOODS = ("apples", "pencils", "stamps", "marbles", "cookies", "books", "tickets", "cards")


def addition(rng: Random) -> Problem:
    digits = rng.randint(2, 4)
    a, b = (rng.randrange(10 ** (digits - 1), 10**digits) for _ in range(2))
    ask = rng.choice(["What is {} + {}?", "Add {} and {}.", "Find the sum of {} and {}."])
    steps, carry = [], 0
    places = ["ones", "tens", "hundreds", "thousands"]
    for i in range(digits):
        x, y = a // 10**i % 10, b // 10**i % 10
        total = x + y + carry
        with_carry = f" + {carry}" if carry else ""
        carry, digit = divmod(total, 10)
        carried = f", write {digit} and carry 1" if carry else ""
        steps.append(f"The {places[i]}: {x} + {y}{with_carry} = {total}{carried}.")
    if carry:
        steps.append("The carried 1 goes in front.")
    return Problem(ask.format(a, b), steps, str(a + b))


def subtraction(rng: Random) -> Problem:
    b = rng.randrange(11, 2000)
    a = b + rng.randrange(5, 3000)
    ask = rng.choice(["What is {0} - {1}?", "Subtract {1} from {0}.", "How much is {0} less {1}?"])
    hundreds, rest = b // 100 * 100, b % 100
    steps, left = [], a
    for part in (hundreds, rest // 10 * 10, rest % 10):
        if part:
            steps.append(f"Take away {part}: {left} - {part} = {left - part}.")
            left -= part
    return Problem(ask.format(a, b), steps, str(left))


def multiplication(rng: Random) -> Problem:
    a, b = rng.randrange(12, 1000), rng.randrange(12, 100)
    ask = rng.choice(["What is {} times {}?", "Multiply {} by {}.", "Compute {} x {}."])
    tens, ones = b // 10 * 10, b % 10
    steps = [f"{a} x {tens} = {a * tens}."]
    if ones:
        steps = [f"Split {b} into {tens} and {ones}.", *steps, f"{a} x {ones} = {a * ones}."]
        steps.append(f"Together: {a * tens} + {a * ones} = {a * b}.")
    return Problem(ask.format(a, b), steps, str(a * b))


def division(rng: Random) -> Problem:
    divisor, quotient = rng.randrange(3, 26), rng.randrange(5, 120)
    rest = rng.randrange(divisor)
    number = divisor * quotient + rest
    ask = rng.choice(["Divide {} by {}.", "How often does {1} go into {0}, and what remains?"])
    steps = [f"{divisor} x {quotient} = {divisor * quotient}."]
    steps.append(f"What remains is {number} - {divisor * quotient} = {rest}.")
    answer = f"{quotient} remainder {rest}" if rest else str(quotient)
    return Problem(ask.format(number, divisor), steps, answer)


def order_of_operations(rng: Random) -> Problem:
    a, b, c, d = (rng.randint(2, 12) for _ in range(4))
    if rng.random() < 0.5:
        steps = [f"Products first: {b} x {c} = {b * c}."]
        steps.append(f"From left to right: {a} + {b * c} = {a + b * c}.")
        steps.append(f"Then {a + b * c} - {d} = {a + b * c - d}.")
        return Problem(f"Evaluate {a} + {b} x {c} - {d}.", steps, str(a + b * c - d))
    steps = [f"The bracket first: {a} + {b} = {a + b}.", f"Then {a + b} x {c} = {(a + b) * c}."]
    steps.append(f"Finally {(a + b) * c} + {d} = {(a + b) * c + d}.")
    return Problem(f"Evaluate ({a} + {b}) x {c} + {d}.", steps, str((a + b) * c + d))


def simplify_fraction(rng: Random) -> Problem:
    a, b, k = rng.randint(1, 15), rng.randint(2, 16), rng.randint(2, 12)
    top, bottom = a * k, b * k
    factor = math.gcd(top, bottom)
    ask = rng.choice(["Simplify {}/{}.", "Write {}/{} in lowest terms.", "Reduce {}/{}."])
    steps = [f"The greatest common divisor of {top} and {bottom} is {factor}."]
    steps.append(
        f"{top} / {factor} = {top // factor} and {bottom} / {factor} = {bottom // factor}."
    )
    return Problem(ask.format(top, bottom), steps, str(Fraction(top, bottom)))


def add_fractions(rng: Random) -> Problem:
    b, d = rng.sample(range(2, 13), 2)
    a, c = rng.randint(1, b - 1), rng.randint(1, d - 1)
    sign = rng.choice("+-")
    if sign == "-" and Fraction(a, b) < Fraction(c, d):
        a, b, c, d = c, d, a, b
    lcm = math.lcm(b, d)
    x, y = a * lcm // b, c * lcm // d
    total = x + y if sign == "+" else x - y
    steps = [f"The least common denominator of {b} and {d} is {lcm}."]
    steps.append(f"{a}/{b} = {x}/{lcm} and {c}/{d} = {y}/{lcm}.")
    steps.append(f"{x}/{lcm} {sign} {y}/{lcm} = {total}/{lcm}.")
    answer = str(Fraction(total, lcm))
    if answer != f"{total}/{lcm}":
        steps.append(f"In lowest terms this is {answer}.")
    ask = rng.choice(["What is {}?", "Work out {}.", "Calculate {}."])
    return Problem(ask.format(f"{a}/{b} {sign} {c}/{d}"), steps, answer)


def multiply_fractions(rng: Random) -> Problem:
    b, d = rng.randint(2, 12), rng.randint(2, 12)
    a, c = rng.randint(1, 11), rng.randint(1, 11)
    steps = [f"Multiply the numerators: {a} x {c} = {a * c}."]
    steps.append(f"Multiply the denominators: {b} x {d} = {b * d}.")
    answer = str(Fraction(a * c, b * d))
    if answer != f"{a * c}/{b * d}":
        steps.append(f"{a * c}/{b * d} in lowest terms is {answer}.")
    return Problem(f"Multiply {a}/{b} by {c}/{d}.", steps, answer)


def linear_equation(rng: Random) -> Problem:
    x, a = rng.randint(-12, 20), rng.randint(2, 12)
    b = rng.choice([n for n in range(-20, 21) if n])
    variable = rng.choice("xyzntk")
    shown, undo = (f"+ {b}", f"Subtract {b}") if b > 0 else (f"- {-b}", f"Add {-b}")
    ask = rng.choice(["Solve {} for {}.", "Solve {}. What is {}?", "If {}, find {}."])
    steps = [f"{undo} on both sides: {a}{variable} = {a * x}."]
    steps.append(f"Divide both sides by {a}: {variable} = {x}.")
    return Problem(
        ask.format(f"{a}{variable} {shown} = {a * x + b}", variable), steps, f"{variable} = {x}"
    )


def equation_both_sides(rng: Random) -> Problem:
    x, c = rng.randint(1, 15), rng.randint(2, 8)
    a, b = c + rng.randint(1, 9), rng.randint(1, 30)
    d = (a - c) * x + b
    steps = [f"Subtract {c}x on both sides: {a - c}x + {b} = {d}."]
    steps.append(f"Subtract {b} on both sides: {a - c}x = {d - b}.")
    steps.append(f"Divide both sides by {a - c}: x = {x}.")
    return Problem(f"Solve {a}x + {b} = {c}x + {d}.", steps, f"x = {x}")


def percentage(rng: Random) -> Problem:
    percent, base = rng.choice([5, 10, 12, 15, 20, 25, 30, 40, 60, 75]), rng.randrange(20, 900, 20)
    value = Fraction(percent * base, 100)
    ask = rng.choice(["What is {}% of {}?", "Find {} percent of {}.", "How much is {}% of {}?"])
    steps = [f"1% of {base} is {_decimal(Fraction(base, 100))}."]
    steps.append(f"{percent}% is {percent} x {_decimal(Fraction(base, 100))} = {_decimal(value)}.")
    return Problem(ask.format(percent, base), steps, _decimal(value))


def discount(rng: Random) -> Problem:
    price, percent = rng.randrange(20, 400, 10), rng.choice([5, 10, 15, 20, 25, 30, 40, 50])
    off = Fraction(price * percent, 100)
    thing = rng.choice(["coat", "lamp", "bicycle", "radio", "chair", "tent", "watch", "camera"])
    name = rng.choice(NAMES)
    steps = [f"The discount is {percent}% of ${price}, which is ${_decimal(off)}."]
    steps.append(f"${price} - ${_decimal(off)} = ${_decimal(price - off)}.")
    question = f"A {thing} costs ${price}. {name} gets {percent}% off. How much does {name} pay?"
    return Problem(question, steps, f"${_decimal(price - off)}")


def arithmetic_sequence(rng: Random) -> Problem:
    first, step, n = rng.randint(-10, 30), rng.randint(2, 15), rng.randint(8, 40)
    shown = ", ".join(str(first + i * step) for i in range(4))
    last = first + (n - 1) * step
    steps = [f"Each term is {step} more than the one before."]
    steps.append(f"Term {n} is {first} + {n - 1} x {step} = {first} + {(n - 1) * step} = {last}.")
    return Problem(f"The sequence {shown}, ... goes on. What is term {n}?", steps, str(last))


def geometric_sequence(rng: Random) -> Problem:
    first, ratio = rng.randint(1, 12), rng.randint(2, 4)
    terms = [first * ratio**i for i in range(6)]
    steps = [f"{terms[1]} / {terms[0]} = {ratio}, so each term is {ratio} times the one before."]
    steps += [f"{terms[i]} x {ratio} = {terms[i + 1]}." for i in (3, 4)]
    shown = ", ".join(map(str, terms[:4]))
    return Problem(
        f"What are the next two terms of {shown}, ...?", steps, f"{terms[4]}, {terms[5]}"
    )


def rectangle(rng: Random) -> Problem:
    a, b = rng.randint(3, 40), rng.randint(3, 40)
    unit = rng.choice(["cm", "m", "feet", "inches"])
    what = rng.choice(["room", "field", "card", "garden", "poster"])
    if rng.random() < 0.5:
        steps = ["The area is length times width.", f"{a} x {b} = {a * b}."]
        question = f"A {what} is {a} {unit} long and {b} {unit} wide. What is its area?"
        return Problem(question, steps, f"{a * b} square {unit}")
    steps = ["The perimeter is twice the sum of length and width."]
    steps.append(f"{a} + {b} = {a + b}, and 2 x {a + b} = {2 * (a + b)}.")
    question = f"What is the perimeter of a {what} of {a} {unit} by {b} {unit}?"
    return Problem(question, steps, f"{2 * (a + b)} {unit}")


def triangle_angles(rng: Random) -> Problem:
    a = rng.randint(20, 90)
    b = rng.randint(20, 150 - a)
    steps = ["The angles of a triangle add up to 180 degrees."]
    steps.append(f"{a} + {b} = {a + b}, and 180 - {a + b} = {180 - a - b}.")
    question = f"Two angles of a triangle are {a} and {b} degrees. How large is the third?"
    return Problem(question, steps, f"{180 - a - b} degrees")


def is_prime(rng: Random) -> Problem:
    n = rng.randrange(51, 600, 2)
    limit = math.isqrt(n)
    divisor = next((d for d in range(2, limit + 1) if n % d == 0), None)
    steps = [f"{limit} x {limit} = {limit**2}, so divisors up to {limit} are enough to try."]
    for d in (p for p in range(2, limit + 1) if all(p % q for q in range(2, p))):
        if n % d == 0:
            steps.append(f"{n} / {d} = {n // d}, without remainder.")
            break
        steps.append(f"{n} = {d} x {n // d} + {n % d}.")
    answer = f"no, {n} = {divisor} x {n // divisor}" if divisor else f"yes, {n} is prime"
    return Problem(f"Is {n} a prime number?", steps, answer)


def factorize(rng: Random) -> Problem:
    n = math.prod(rng.choice([2, 2, 2, 3, 3, 5, 7, 11]) for _ in range(rng.randint(3, 5)))
    steps, left, factors = [], n, []
    while left > 1:
        p = next(d for d in range(2, left + 1) if left % d == 0)
        if left != p:
            steps.append(f"{left} = {p} x {left // p}.")
        factors.append(p)
        left //= p
    steps.append(f"{factors[-1]} is prime.")
    return Problem(f"Write {n} as a product of primes.", steps, " x ".join(map(str, factors)))


def greatest_common_divisor(rng: Random) -> Problem:
    k = rng.randint(2, 24)
    a, b = sorted((k * rng.randint(2, 20), k * rng.randint(2, 20)), reverse=True)
    steps, x, y = ["Use Euclid's algorithm."], a, b
    while y:
        steps.append(f"{x} = {x // y} x {y} + {x % y}.")
        x, y = y, x % y
    return Problem(f"Find the greatest common divisor of {a} and {b}.", steps, str(x))


UNITS = (
    ("kilometres", "metres", 1000),
    ("metres", "centimetres", 100),
    ("kilograms", "grams", 1000),
    ("hours", "minutes", 60),
    ("minutes", "seconds", 60),
    ("days", "hours", 24),
    ("feet", "inches", 12),
    ("litres", "millilitres", 1000),
)


def unit_conversion(rng: Random) -> Problem:
    large, small, factor = rng.choice(UNITS)
    n, extra = rng.randint(2, 40), rng.randint(1, factor - 1)
    steps = [f"{factor} {small} make one of the {large}: {n} x {factor} = {n * factor}."]
    steps.append(f"{n * factor} + {extra} = {n * factor + extra}.")
    question = f"How many {small} are {n} {large} and {extra} {small}?"
    return Problem(question, steps, f"{n * factor + extra} {small}")


def shopping(rng: Random) -> Problem:
    name, (one, two) = rng.choice(NAMES), rng.sample(GOODS, 2)
    a, b, p, q = (rng.randint(2, 12) for _ in range(4))
    paid = (a * p + b * q) // 50 * 50 + 50
    question = (
        f"{name} buys {a} {one} at ${p} each and {b} {two} at ${q} each, and pays with ${paid}. "
        "How much change is there?"
    )
    steps = [f"The {one} cost {a} x ${p} = ${a * p}.", f"The {two} cost {b} x ${q} = ${b * q}."]
    steps.append(f"Together that is ${a * p + b * q}.")
    steps.append(f"The change is ${paid} - ${a * p + b * q} = ${paid - a * p - b * q}.")
    return Problem(question, steps, f"${paid - a * p - b * q}")


def sharing(rng: Random) -> Problem:
    name, friends, each = rng.choice(NAMES), rng.randint(3, 12), rng.randint(3, 15)
    rest, goods = rng.randrange(1, friends), rng.choice(GOODS)
    total = friends * each + rest
    question = (
        f"{name} shares {total} {goods} evenly among {friends} friends and keeps the rest. "
        f"How many {goods} does {name} keep?"
    )
    steps = [f"{friends} x {each} = {friends * each} is the most that can be shared evenly."]
    steps.append(f"{total} - {friends * each} = {rest}.")
    return Problem(question, steps, f"{rest} {goods}")


def speed(rng: Random) -> Problem:
    v, t = rng.randrange(20, 130, 5), rng.randint(2, 9)
    vehicle = rng.choice(["train", "car", "bus", "ship", "cyclist"])
    if rng.random() < 0.5:
        steps = ["Distance is speed times time.", f"{v} x {t} = {v * t}."]
        question = f"A {vehicle} goes {v} km an hour for {t} hours. How far does it get?"
        return Problem(question, steps, f"{v * t} km")
    steps = ["Time is distance divided by speed.", f"{v * t} / {v} = {t}."]
    question = f"How long does a {vehicle} need for {v * t} km at {v} km an hour?"
    return Problem(question, steps, f"{t} hours")


def average(rng: Random) -> Problem:
    n, mean = rng.randint(3, 6), rng.randint(40, 90)
    offsets = [rng.randint(-8, 8) for _ in range(n - 1)]
    numbers = [mean + offset for offset in (*offsets, -sum(offsets))]
    total = sum(numbers)
    steps = [f"The sum is {' + '.join(map(str, numbers))} = {total}."]
    steps.append(f"There are {n} numbers, and {total} / {n} = {total // n}.")
    question = f"What is the average of {', '.join(map(str, numbers))}?"
    return Problem(question, steps, str(total // n))


def compare_decimals(rng: Random) -> Problem:
    whole = rng.randint(0, 9)
    a, b = f"{whole}.{rng.randint(1, 9)}", f"{whole}.{rng.randint(1, 9)}{rng.randint(1, 9)}"
    x, y = int(a.replace(".", "")) * 10, int(b.replace(".", ""))
    larger = a if x > y else b
    steps = [f"In hundredths, {a} is {x} and {b} is {y}."]
    steps.append(f"{max(x, y)} is more than {min(x, y)}.")
    return Problem(f"Which is larger, {a} or {b}?", steps, larger)


def powers(rng: Random) -> Problem:
    base, exponent = rng.randint(2, 9), rng.randint(2, 5)
    steps, value = [], base
    for _ in range(exponent - 1):
        steps.append(f"{value} x {base} = {value * base}.")
        value *= base
    ask = rng.choice(["What is {} to the power of {}?", "Calculate {}^{}."])
    return Problem(ask.format(base, exponent), steps, str(value))


def rounding(rng: Random) -> Problem:
    n, place = rng.randrange(1001, 99999), rng.choice([10, 100, 1000])
    low = n // place * place
    up = n - low >= place / 2
    steps = [f"{n} lies between {low} and {low + place}; halfway is {low + place // 2}."]
    steps.append(
        f"{n} is {'not below' if up else 'below'} that, so round {'up' if up else 'down'}."
    )
    return Problem(f"Round {n} to the nearest {place}.", steps, str(low + place * up))


def simple_interest(rng: Random) -> Problem:
    sum_, rate, years = rng.randrange(200, 5000, 100), rng.randint(2, 9), rng.randint(2, 8)
    yearly = sum_ * rate // 100
    name = rng.choice(NAMES)
    steps = [f"One year brings {rate}% of ${sum_}, which is ${yearly}."]
    steps.append(f"{years} years bring {years} x ${yearly} = ${years * yearly}.")
    question = (
        f"{name} saves ${sum_} at {rate}% simple interest a year. How much interest is that after "
        f"{years} years?"
    )
    return Problem(question, steps, f"${years * yearly}")


def probability(rng: Random) -> Problem:
    red, blue, green = (rng.randint(1, 12) for _ in range(3))
    colour, count = rng.choice([("red", red), ("blue", blue), ("green", green)])
    total = red + blue + green
    steps = [
        f"There are {red} + {blue} + {green} = {total} balls, and {count} of them are {colour}."
    ]
    answer = str(Fraction(count, total))
    if answer != f"{count}/{total}":
        steps.append(f"{count}/{total} in lowest terms is {answer}.")
    question = (
        f"A bag holds {red} red, {blue} blue and {green} green balls. What is the probability of "
        f"drawing a {colour} one?"
    )
    return Problem(question, steps, answer)


def two_equations(rng: Random) -> Problem:
    x, y = rng.randint(2, 40), rng.randint(1, 39)
    x, y = max(x, y + 1), min(x, y)
    steps = [f"Add the equations: 2x = {x + y} + {x - y} = {2 * x}.", f"So x = {x}."]
    steps.append(f"Then y = {x + y} - {x} = {y}.")
    return Problem(f"Solve x + y = {x + y} and x - y = {x - y}.", steps, f"x = {x}, y = {y}")


def ages(rng: Random) -> Problem:
    (one, two), a, d = rng.sample(NAMES, 2), rng.randint(5, 30), rng.randint(2, 15)
    later = rng.randint(2, 12)
    question = (
        f"{one} is {a} years old and {two} is {d} years older. How old will {two} be in {later} "
        "years?"
    )
    steps = [f"{two} is {a} + {d} = {a + d} now.", f"{a + d} + {later} = {a + d + later}."]
    return Problem(question, steps, f"{a + d + later} years")


def recipe(rng: Random) -> Problem:
    people, grams, factor = rng.randint(2, 6), rng.randrange(20, 200, 5), rng.randint(3, 9)
    food = rng.choice(["rice", "flour", "sugar", "lentils", "oats", "butter"])
    total = people * grams
    question = (
        f"A recipe for {people} people takes {total} grams of {food}. How much {food} is needed "
        f"for {people + factor} people?"
    )
    steps = [f"One person takes {total} / {people} = {grams} grams."]
    steps.append(f"{people + factor} x {grams} = {(people + factor) * grams}.")
    return Problem(question, steps, f"{(people + factor) * grams} grams")


def binary(rng: Random) -> Problem:
    n = rng.randrange(9, 512)
    steps, left = [], n
    while left:
        steps.append(f"{left} = 2 x {left // 2} + {left % 2}.")
        left //= 2
    steps.append("Read the remainders from the last to the first.")
    return Problem(f"Write {n} in binary.", steps, f"{n:b}")


def cuboid(rng: Random) -> Problem:
    a, b, c = (rng.randint(2, 15) for _ in range(3))
    unit = rng.choice(["cm", "m", "inches"])
    steps = [f"{a} x {b} = {a * b}.", f"{a * b} x {c} = {a * b * c}."]
    question = f"A box measures {a} by {b} by {c} {unit}. What is its volume?"
    return Problem(question, steps, f"{a * b * c} cubic {unit}")


def _decimal(value: Fraction) -> str:
    """A number of at most two decimals, written without superfluous zeros."""
    assert value * 100 == int(value * 100)
    return str(value) if value.denominator == 1 else f"{float(value):.2f}".rstrip("0")


TRAINED_KINDS = (
    Kind("Addition with carrying", addition),
    Kind("Subtraction in parts", subtraction),
    Kind("Multiplication in parts", multiplication),
    Kind("Division with remainder", division),
    Kind("The order of operations", order_of_operations),
    Kind("Simplifying fractions", simplify_fraction),
    Kind("Adding and subtracting fractions", add_fractions),
    Kind("Multiplying fractions", multiply_fractions),
    Kind("Linear equations", linear_equation),
    Kind("Equations with the unknown on both sides", equation_both_sides),
    Kind("Percentages", percentage),
    Kind("Prices and discounts", discount),
    Kind("Arithmetic sequences", arithmetic_sequence),
    Kind("Geometric sequences", geometric_sequence),
    Kind("Rectangles", rectangle),
    Kind("Angles of a triangle", triangle_angles),
    Kind("Prime numbers", is_prime),
    Kind("Prime factors", factorize),
    Kind("Greatest common divisors", greatest_common_divisor),
    Kind("Converting units", unit_conversion),
    Kind("At the shop", shopping),
    Kind("Sharing evenly", sharing),
    Kind("Speed, distance and time", speed),
    Kind("Averages", average),
    Kind("Comparing decimals", compare_decimals),
    Kind("Powers", powers),
    Kind("Rounding", rounding),
)
RESERVED_KINDS = (
    Kind("Simple interest", simple_interest),
    Kind("Probability", probability),
    Kind("Two equations with two unknowns", two_equations),
    Kind("Ages", ages),
    Kind("Recipes for more people", recipe),
    Kind("Binary numbers", binary),
    Kind("Boxes and their volume", cuboid),
)
