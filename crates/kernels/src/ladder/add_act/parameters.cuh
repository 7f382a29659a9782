// y = gelu(x + r) over `count` elements.
struct Parameters {
    const Element* g_x;  // [count]
    const Element* g_r;  // [count]
    Element* g_y;        // [count]
    long long count, fault;
    Element* g_sum;  // for the rung with two launches: [count]
};
