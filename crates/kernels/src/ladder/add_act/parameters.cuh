// y = gelu(x + r) over `count` elements.
struct Parameters {
    const Element* g_x;
    const Element* g_r;
    Element* g_y;
    long long count, fault, workspace;
};
