//! Graphs in text form: one of each kind of statement, and what users write first.

/// A well-formed graph that has no gradient.
pub const CACHE: &str = "cache = input bf16[2,3,4,9,8] ; rows = input bf16[2,3,4,2,8] ; p = input i32[3] ; q = input bf16[3,4,2,8]
c = append cache rows p batch=1
ks = slice c axis=0 start=0 length=1 ; k = reshape ks [3,4,9,8] ; vs = slice c axis=0 start=1 length=1 ; v = reshape vs [3,4,9,8]
a = attention q k v p mask=cached
s = attention_scores q k p mask=cached
out a s c";

/// Well-formed graphs. With [`CACHE`] they hold every operation.
pub const GRAPHS: [&str; 12] = [
    "graph norm_gelu
x = input f32[4,8]
w = weight f32[8] ; b = weight f32[8]
y, mean, rstd = layer_norm x w b eps=1e-5
z = gelu y kind=tanh
out z rstd",
    "s = matmul q[128,64] k[64,128] ; p = softmax s ; out p",
    "x = input bf16[2,3,8] ; r = input bf16[2,3,8] ; seed = input i32[]
d = dropout x seed p=0.1 offset=3
s = add d r
y, inv = rms_norm s g:bf16[8] eps=1e-6
q, scale = quantize_int8 y
f, scale8 = quantize_fp8 y
back = dequantize q scale bf16
out s q scale f scale8 back",
    "tokens = input i32[2,5] ; wte = weight f32[17,6] ; t = input i32[2,5]
e = gather wte tokens
l = matmul e wte transpose_b
loss, lse = cross_entropy l t
z = scatter_add tokens e rows=17
out loss lse z",
    "q = input f16[2,3,7,4] ; k = input f16[2,3,7,4] ; v = input f16[2,3,7,4] ; m = input f16[7,7] ; seed = input i32[]
a = attention q k v mask=causal
b = attention q k v m seed mask=additive scale=0.25 p=0.5 offset=1
c = attention_scores q k
d = causal_mask c
out a b c d",
    "x = input f32[6,10]
a = neg x ; b = abs a ; c = exp a ; d = add b 1.5 ; e = log d ; f = sqrt d ; g = rsqrt d ; h = reciprocal d
i = tanh c ; j = erf c ; k = sigmoid c ; l = round c ; m = sub x a ; n = mul x -2.5 ; o = div x d ; p = max x a ; q = min x a
c1 = lt x a ; c2 = le x a ; c3 = eq x a ; c4 = ne x a ; c5 = gt x a ; c6 = ge x a ; s = select c1 x a
out e f g h i j k l m n o p q c2 c3 c4 c5 c6 s",
    "x = input f32[6,10] ; seed = input i32[]
a = row_sum x ; b = row_mean x ; c = row_max x ; d = row_absmax x ; e = row_argmax x ; f = column_sum x
g = reshape x [3,20] ; h = transpose x [1,0] ; i = slice x axis=1 start=2 length=5 ; j = broadcast a [6,10]
k = concat x j axis=0 ; l = iota [6,10] axis=0 ; m = random seed [6,10] drop=0.25 offset=7 ; n = cast x f16
o = const 3.5 f32 ; p = stop_gradient x ; r = mul p o
out a b c d e f g h i j k l m n r",
    "x = input f32[4,16] ; g = input f32[4,16]
a = silu x ; b = relu x ; c = swiglu x g ; d = geglu x g kind=erf ; e = linear x w[16,3] bias[3] ; f = linear x v[5,16] transposed
out a b c d e f",
    "tokens = input i32[3] ; table = weight i8[9,70] ; x = gather table tokens ; xs = input f32[3,1]
y = quantized_linear x xs w:i8[33,70] ws[33] b[33] bf16
out y",
    "x = input i8[5,70] ; xs = input f32[5,1] ; experts = input i32[5]
y = expert_linear x xs experts w:i8[3,33,70] ws[3,33] b[3,33] f16
out y",
    "x = input f32[5,70] ; experts = input i32[5,2] ; shares = input f32[5,2]
y = routed_linear x experts w[3,33,70] b[3,33] ; z = gelu y ; s = weighted_sum z shares
out s",
    "x = input f32[2,2] # a comment
grad(add) {
  %1 = add x x
  part 2
  %2 = mul %1 x
}
out y=%2 x",
];

/// Texts that must be refused, and a word of the message.
pub const MALFORMED: [(&str, &str); 31] = [
    (
        "c = input f32[2,3,4] ; r = input f32[2,1,4] ; i = input i32[2] ; k = append c r i batch=18446744073709551615 ; out k",
        "whose leading axes hold the batch",
    ),
    ("y = add x x", "unknown value"),
    ("x = input f32[2,3] ; y = frobnicate x", "unknown operation"),
    ("x = input f32[2,3] ; r = input f32[4] ; y = add x r ; out y", "broadcast"),
    ("x = input f32[2,3] ; y = input f16[2,3] ; z = add x y", "one dtype"),
    ("x = input f99[2]", "needs a type"),
    ("x = input f32[2", "expected `]`"),
    ("x = input f32 2]", "expected `[`"),
    ("x = input f32[99999999999999999999]", "whole sizes"),
    ("x = input f32[4294967296,4294967296,4294967296]", "too large"),
    ("x = input f32[1,1,1,1,1,1,1,1,1]", "axes"),
    ("x = input f32[4] ; x = input f32[4]", "taken"),
    ("x = input f32[4] ; seed = input i32[] ; y = dropout x seed p=1.5", "in [0, 1)"),
    ("x = input f32[4] ; seed = input i32[] ; y = dropout x seed p=nan", "number"),
    ("x = input f32[4] ; y = row_sum x axis=1", "no such attribute"),
    ("x = input f32[4,4] ; y, z = softmax x", "results"),
    ("x = input f32[4,4] ; %7 = softmax x", "next node"),
    ("block {", "expected `}`"),
    ("}", "open block"),
    ("x = input f32[2,2] ; y = slice x axis=1 start=1 length=2", "within the axis"),
    ("c = input f32[2,4,3] ; r = input f32[2,5,3] ; p = input i32[2] ; y = append c r p batch=0", "at most 4 rows"),
    ("c = input f32[2,4,3] ; r = input f32[2,1,2] ; p = input i32[2] ; y = append c r p batch=0", "only in axis 1"),
    ("c = input f32[2,4,3] ; r = input f32[2,1,3] ; p = input i32[2] ; y = append c r p batch=1", "hold the batch"),
    ("q = input f32[2,3,4] ; p = input i32[3] ; y = attention q q q p mask=cached", "for each sequence"),
    (
        "x = input i8[5,7] ; s = input f32[5,1] ; e = input i32[4] ; y = expert_linear x s e w:i8[3,9,7] v[3,9] f32",
        "an i32 expert",
    ),
    ("x = input f32[5,7] ; e = input i32[4] ; y = routed_linear x e w[3,9,7]", "a row for each expert picked"),
    ("x = input f32[5,7] ; e = input i32[5] ; y = routed_linear x e w:f16[3,9,7]", "operands of one dtype"),
    ("x = input f32[5,3,7] ; s = input f32[5,2] ; y = weighted_sum x s", "weights [.., choices]"),
    ("x = input f32[2,2] ; y = transpose x [0,0]", "permutation"),
    ("x = input f32[2,2] ; y = const nan f32", "expected"),
    ("out nothing", "unknown value"),
];
