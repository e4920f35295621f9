"""Make the small Spider folder of these tests: python tests/lab/tasks/data/make_spider.py"""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

FOLDER = Path(__file__).parent / "spider"
SCHEMAS = {
    "concert": {
        "singer": (["singer_id", "name", "age"], [[1, "Ada", 40], [2, "Bo", 25], [3, "Cy", 25], [4, "Di", 61]]),
        "concert": (
            ["concert_id", "singer_id", "year", "price"],
            [[1, 1, 2014, 10.5], [2, 1, 2015, 20.0], [3, 2, 2015, 10.5], [4, 4, 2016, 7.25]],
        ),
    },
    "pets": {"pet": (["pet_id", "kind", "weight"], [[1, "cat", 4.5], [2, "dog", 20.0], [3, "cat", 5.5]])},
}
JOIN = "SELECT T1.name FROM singer AS T1 JOIN concert AS T2 ON T1.singer_id = T2.singer_id WHERE T2.year = 2015"
DEV = [
    ("concert", "How many singers are there?", "SELECT count(*) FROM singer"),
    ("concert", "List names and ages by age.", "SELECT name ,  age FROM singer ORDER BY age DESC, name"),
    ("concert", "Years of all concerts?", "SELECT year FROM concert"),
    ("concert", "Who sang in 2015?", JOIN),
    ("pets", "Mean weight per kind?", "SELECT kind, avg(weight) FROM pet GROUP BY kind"),
]


def tables_json() -> list[dict[str, object]]:
    """The schemas as Spider's tables.json has them."""
    made = []
    for name, tables in SCHEMAS.items():
        columns = [[-1, "*"]] + [[i, c] for i, (names, _) in enumerate(tables.values()) for c in names]
        made.append(
            {
                "db_id": name,
                "table_names_original": list(tables),
                "table_names": list(tables),
                "column_names_original": columns,
                "column_names": [[i, c.replace("_", " ")] for i, c in columns],
                "column_types": ["text"] * len(columns),
                "primary_keys": [1],
                "foreign_keys": [],
            }
        )
    return made


def main() -> None:
    """Write dev.json, tables.json and the databases."""
    for name, tables in SCHEMAS.items():
        path = FOLDER / "database" / name / f"{name}.sqlite"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        with closing(sqlite3.connect(path)) as database, database:
            for table, (columns, rows) in tables.items():
                database.execute(f"CREATE TABLE {table} ({', '.join(columns)})")
                database.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(columns))})", rows)
    (FOLDER / "tables.json").write_text(json.dumps(tables_json(), indent=1) + "\n")
    dev = [{"db_id": d, "question": q, "query": s, "query_toks": s.split(), "sql": {}} for d, q, s in DEV]
    (FOLDER / "dev.json").write_text(json.dumps(dev, indent=1) + "\n")


if __name__ == "__main__":
    main()
