"""Search: equation (14) over the segments of a store, exactly, fast and filtered."""

from engine.search.filters import FilterError, check_filter, compile_filter
from engine.search.request import ArraySegment, Ranking, SearchRequest, SearchResult
from engine.search.searcher import Searcher

__all__ = ["ArraySegment", "FilterError", "Ranking", "SearchRequest", "SearchResult", "Searcher", "check_filter", "compile_filter"]
