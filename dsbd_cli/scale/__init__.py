"""Past one process: one engine in each of several Ray workers, behind the interface of one engine.

window: which row is where; worker: what runs beside an engine; pool: Ray.
"""
