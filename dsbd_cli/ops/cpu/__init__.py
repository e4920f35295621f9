"""Operations on a CPU: packed and int8 products, attention, parts of layers, sums over a vocabulary."""
