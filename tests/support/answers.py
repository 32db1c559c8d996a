r"""Answers and labels whose truth was written by hand: (answer, label) pairs that say the same, and pairs that do not.

Each line is one pair, `answer  ==  label` or `answer  !=  label`; what stands in the box is the answer.  The truth is
that of a careful teacher: another spelling, a missing unit or an unreduced fraction is right; another value, unit,
base, order or word is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator

TABLE = r"""
# whole numbers and decimals
42  ==  42
42.0  ==  42
042  ==  42
+42  ==  42
-42  ==  -42
−42  ==  -42
- 42  ==  -42
42.  ==  42
$42$  ==  42
\(42\)  ==  42
1,000  ==  1000
1000  ==  1,000
1{,}000  ==  1000
1\,000\,000  ==  1000000
1\!,\!234  ==  1234
1\! , \!234\!,\!567  ==  1234567
1\!,234  ==  1234
1\!,\!23  !=  123
1\!,\!2345  !=  12345
10 000  ==  10000
1,234,567  ==  1234567
1,234.50  ==  1234.5
.5  ==  0.5
0.50  ==  0.5
5e-1  ==  0.5
1e3  ==  1000
1E3  ==  1000
1.5 \times 10^3  ==  1500
3 \cdot 10^{-2}  ==  0.03
２５  ==  25
\mathbf{7}  ==  7
\textbf{7}  ==  7
{7}  ==  7
\boxed{7}  ==  7
0  ==  -0
0.\overline{3}  ==  1/3
0.1\overline{6}  ==  \frac{1}{6}
42  !=  43
42  !=  -42
4.2  !=  42
0.3333  !=  1/3
0.33  !=  0.333
3.14  !=  \pi
3.14159265358979  !=  \pi
1.41421356  !=  \sqrt{2}
1,00  !=  100
1000  !=  1,00
10^3  !=  103
1e3  !=  13
100000000000000000001  !=  100000000000000000000
9007199254740993  !=  9007199254740992
0.1000000000000000055511151231257827  !=  0.1
  !=  0
{}  !=  0
42 43  !=  4243
1 2  !=  2
--  !=  0
# fractions and mixed numbers
1/2  ==  0.5
0.5  ==  1/2
\frac{1}{2}  ==  \frac12
\frac12  ==  0.5
\dfrac{1}{2}  ==  1/2
\tfrac12  ==  1/2
\frac 1 2  ==  1/2
\frac{1}2  ==  1/2
2/4  ==  1/2
\frac{10}{2}  ==  5
-\frac{3}{4}  ==  \frac{-3}{4}
\frac{3}{-4}  ==  -0.75
½  ==  1/2
3½  ==  7/2
1 1/2  ==  \frac32
1\frac12  ==  \frac32
1\frac{1}{2}  ==  1.5
-1\frac{1}{2}  ==  -1.5
2\dfrac{3}{4}  ==  \frac{11}{4}
\left(\frac{1}{2}\right)  ==  \frac{1}{2}
(1/2)  ==  1/2
\frac{\frac{1}{2}}{\frac{1}{3}}  ==  1.5
\frac{1}{1+\frac{1}{2}}  ==  \frac{2}{3}
22/7  !=  \pi
1/2  !=  2
\frac{1}{2}  !=  \frac{2}{1}
\frac{1}{3}  !=  0.3
1\frac12  !=  \frac12
2\frac53  !=  \frac{11}{3}
2\frac{5}{3}  ==  \frac{10}{3}
2 5/3  !=  11/3
1 1/2  !=  11/2
3/4  !=  4/3
-1/2  !=  1/2
\frac{1}{0}  !=  0
\frac{0}{0}  !=  1
# roots, powers, constants, functions
\sqrt{8}  ==  2\sqrt{2}
2\sqrt2  ==  \sqrt{8}
\sqrt{16}  ==  4
√2  ==  \sqrt{2}
2√3  ==  \sqrt{12}
sqrt(2)/2  ==  \frac{\sqrt{2}}{2}
\frac{1}{\sqrt{2}}  ==  \frac{\sqrt{2}}{2}
\frac{\sqrt{3}}{3}  ==  \frac{1}{\sqrt3}
\sqrt[3]{8}  ==  2
\sqrt[3]{-8}  ==  -2
2^{1/2}  ==  \sqrt2
4^{3/2}  ==  8
2^{10}  ==  1024
2^{-3}  ==  \frac18
10^{100}  ==  10^{100}
5!  ==  120
\binom{5}{2}  ==  10
\dbinom52  ==  10
\pi  ==  π
2π  ==  2\pi
2 \cdot \pi  ==  2\pi
\frac{\pi}{2}  ==  0.5\pi
\frac{4\pi}{3}  ==  \frac43\pi
pi/4  ==  \frac{\pi}{4}
e^2  ==  e^{2}
\ln e  ==  1
\log_2 8  ==  3
\log_{10} 100  ==  2
\ln 4  ==  2\ln 2
\ln(2) + \ln(3)  ==  \ln 6
\sin 30^\circ  ==  \frac12
\sin(\pi/6)  ==  1/2
\cos 0  ==  1
\tan 45^{\circ}  ==  1
\arctan 1  ==  \frac{\pi}{4}
\tan^{-1}(1)  ==  \frac{\pi}{4}
\sin^2 1 + \cos^2 1  ==  1
|-3|  ==  3
\left|{-3}\right|  ==  3
\lfloor 2.7 \rfloor  ==  2
\lceil 2.1 \rceil  ==  3
\sqrt{3+2\sqrt{2}}  ==  1+\sqrt{2}
(1+\sqrt5)/2  ==  \frac{1+\sqrt{5}}{2}
3+4  ==  7
i^2  ==  -1
(2+3i)(2-3i)  ==  13
3i+2  ==  2+3i
e^{i\pi}  ==  -1
\sqrt{-4}  ==  2i
\sqrt{2}  !=  \sqrt{3}
\sqrt{2}  !=  2
2\sqrt{3}  !=  3\sqrt{2}
\sqrt{2}+\sqrt{3}  !=  \sqrt{5}
2^{3}  !=  6
2^{10}  !=  20
\pi  !=  \pi^2
2\pi  !=  \pi
e  !=  2.71828
e  !=  \pi
5!  !=  5
\binom52  !=  \frac52
\log 2  !=  \ln 2
\sin 30  !=  \frac12
2+3i  !=  2-3i
10^{100}+1  !=  10^{100}
i  !=  1
\infty  !=  100
-\infty  !=  \infty
\infty  ==  \infty
+\infty  ==  \infty
∞  ==  \infty
\text{infinity}  !=  0
# expressions with variables
(x+1)^2  ==  x^2+2x+1
x^2+2x+1  ==  1+2x+x^2
x(x-1)  ==  x^2-x
2x+3  ==  3+2x
2 x + 3  ==  2x+3
x²+1  ==  x^2+1
\frac{x+1}{2}  ==  \frac{x}{2}+\frac{1}{2}
\frac{x^2-1}{x-1}  ==  x+1
-x+1  ==  1-x
xy  ==  yx
ab+c  ==  c+ba
2xyz  ==  2zyx
a^2b  ==  ba^2
x_1+x_2  ==  x_2+x_1
x_{1}  ==  x_1
\alpha+\beta  ==  \beta+\alpha
n(n+1)/2  ==  \frac{n^2+n}{2}
\frac{n(n+1)}{2}  ==  \frac{1}{2}n(n+1)
\sin^2 x  ==  (\sin x)^2
\sin(2x)  ==  2\sin x\cos x
1-\cos^2\theta  ==  \sin^2\theta
e^{x+y}  ==  e^x e^y
2^{n+1}  ==  2\cdot 2^n
\frac{1}{x}  ==  x^{-1}
\sqrt{x}  ==  x^{1/2}
x^{\frac{1}{2}}  ==  \sqrt{x}
(a-b)^2  ==  (b-a)^2
\pi r^2  ==  r^2\pi
n!  ==  n(n-1)!
\frac{a}{b}  ==  a/b
p^3-3pq  ==  p(p^2-3q)
\log_2 x  ==  \frac{\ln x}{\ln 2}
x  !=  y
x+1  !=  x-1
2x  !=  x^2
(x+1)^2  !=  x^2+1
x  !=  -x
|x|  !=  x
\sqrt{x^2}  !=  x
\frac{x}{2}  !=  \frac{2}{x}
x^2-x  !=  x^2+x
x_1  !=  x_2
x_1  !=  x
A  !=  a+1
xy  !=  x+y
\sin x  !=  \cos x
\sin 2x  !=  2\sin x
\frac{1}{x+y}  !=  \frac1x+\frac1y
e^{xy}  !=  e^x e^y
(a+b)^3  !=  a^3+b^3
n  !=  n+0.0000001
2x  !=  2
x  !=  1
# percent
50\%  ==  50
50%  ==  50\%
50  ==  50\%
12\%  ==  12
12.5\%  ==  12.5
12.5  ==  12.5\%
12.5\%  ==  12.5\%
50\text{ percent}  ==  50\%
50 percent  ==  50
50\%  ==  0.5
25\%  ==  \frac14
0.25  ==  25\%
33\frac{1}{3}\%  ==  \frac{100}{3}\%
500\%  !=  5
5  !=  500\%
5\%  !=  50\%
50\%  !=  5
50\%  !=  0.05
1\%  !=  10
25\%  !=  \frac34
12\%  !=  1.2
# units, money, degrees
12\text{ cm}  ==  12
12 \text{ cm}  ==  12\text{cm}
12 cm  ==  12
12cm  ==  12\text{ cm}
12\,\mathrm{cm}  ==  12
12\text{ centimeters}  ==  12\text{ cm}
120\text{ cm}  ==  1.2\text{ m}
5\text{ km}  ==  5000\text{ m}
12\text{ cm}^2  ==  12
12\text{ cm}^2  ==  12\text{ square centimeters}
12\text{ cm}^{2}  ==  12\mathrm{~cm}^2
36\pi\text{ cubic inches}  ==  36\pi
6\sqrt{2}\text{ units}  ==  6\sqrt{2}
60\text{ km/h}  ==  60
60\text{ miles per hour}  ==  60\text{ mph}
90\text{ minutes}  ==  1.5\text{ hours}
5\text{ hours}  ==  5
3 apples  ==  3
3\text{ apples}  ==  3\text{ apple}
24\text{ ways}  ==  24
\$5  ==  5
\$5.00  ==  5
\$1,250  ==  1250
5\text{ dollars}  ==  \$5
5 dollars  ==  5
50\text{ cents}  ==  \$0.50
$\$18.90$  ==  18.90
£5  ==  5
30^\circ  ==  30
30^{\circ}  ==  30^\circ
30°  ==  30
30\text{ degrees}  ==  30^\circ
5\text{ million}  ==  5000000
5 million  ==  5,000,000
2.5\text{ thousand}  ==  2500
5\text{th}  ==  5
5^{\text{th}}  !=  6
12\text{ cm}  !=  12\text{ m}
12\text{ cm}  !=  12\text{ cm}^2
12\text{ cm}^2  !=  12\text{ cm}^3
12\text{ cm}  !=  13
5\text{ hours}  !=  5\text{ minutes}
5\text{ apples}  !=  5\text{ pears}
\$5  !=  5\text{ cents}
\$5  !=  6
5\text{ million}  !=  5
5\text{ or more}  !=  5
\text{not } 5  !=  5
5\text{ is wrong, it is }6  !=  5
60\text{ km/h}  !=  60\text{ m/s}
30^\circ  !=  30\%
30^\circ  !=  60^\circ
5x  !=  5
5m  !=  6
# sets, lists, tuples
\{1,2\}  ==  \{2,1\}
\{1, 2, 3\}  ==  \{3,2,1\}
\{1,2\}  ==  1,2
1,2  ==  \{1,2\}
1, 2  ==  2, 1
1 \text{ and } 2  ==  1,2
1 and 2  ==  1, 2
1\text{ or }2  ==  2,1
-1, 3  ==  3,-1
\left\{1,2\right\}  ==  \{1, 2\}
\lbrace 1,2 \rbrace  ==  \{1,2\}
\{\frac12, 2\}  ==  \{2, 0.5\}
\{x, y\}  ==  \{y, x\}
\{1,1,2\}  ==  \{1,2\}
\{5\}  ==  5
\emptyset  ==  \{\}
∅  ==  \varnothing
(1,2)  ==  (1, 2)
(1,2)  ==  \left(1,2\right)
(\frac{1}{2}, 3)  ==  (0.5,3)
(1,2,3)  ==  ( 1, 2, 3 )
(100,200)  ==  (100, 200)
100,200  ==  100, 200
\langle 1,2\rangle  ==  (1,2)
(-\sqrt{2},\sqrt2)  ==  (-\sqrt2, \sqrt{2})
1\pm\sqrt{2}  ==  1+\sqrt2, 1-\sqrt2
\pm 3  ==  3,-3
1-\sqrt2,1+\sqrt2  ==  1\pm\sqrt{2}
(1,2),(3,4)  ==  (3,4),(1,2)
\{(1,2),(3,4)\}  ==  \{(3,4),(1,2)\}
\{1,2\}  !=  \{1,3\}
\{1,2\}  !=  \{1,2,3\}
\{1,2,3\}  !=  \{1,2\}
1,2  !=  1
1  !=  1,2
1,2,3  !=  1,2
1,1,2  !=  1,2
(1,2)  !=  (2,1)
(1,2)  !=  (1,2,3)
(1,2)  !=  [1,2]
(1,2)  !=  \{1,2\}
\{5\}  !=  6
\emptyset  !=  0
\{0\}  !=  \emptyset
1\pm\sqrt{2}  !=  1+\sqrt{2}
3  !=  \pm 3
(1,2),(3,4)  !=  (1,3),(2,4)
12  !=  1,2
1,2  !=  12
1.2  !=  1,2
# intervals, unions, inequalities
[0,1]  ==  [0, 1]
(0,1]  ==  \left(0,1\right]
(-\infty, 3]  ==  (-\infty,3]
(−∞,3]  ==  (-\infty,3]
(3,\infty)  ==  (3,+\infty)
[\frac12, 1)  ==  [0.5,1)
]0,1[  ==  (0,1)
(-\infty,-1)\cup(1,\infty)  ==  (1,\infty)\cup(-\infty,-1)
(-∞,-1) ∪ (1,∞)  ==  (-\infty,-1)\cup(1,\infty)
x \in [1,2]  ==  [1,2]
x\in(0,1)  ==  (0,1)
x>3  ==  3<x
x \geq 3  ==  x≥3
x \ge 3  ==  3 \le x
x>3  ==  (3,\infty)
-1<x<2  ==  (-1,2)
-1 \le x < 2  ==  [-1,2)
x \leq 5  ==  (-\infty, 5]
2 > x > -1  ==  -1<x<2
x<-1 \text{ or } x>1  ==  (-\infty,-1)\cup(1,\infty)
[0,1]  !=  (0,1)
[0,1]  !=  [0,1)
[0,1)  !=  (0,1]
[0,1]  !=  [0,2]
[0,1]  !=  0,1
[0,1]  !=  \{0,1\}
(-\infty,3]  !=  (\infty,3]
(-\infty,3]  !=  [3,\infty)
x>3  !=  x\geq 3
x>3  !=  x<3
x>3  !=  3
x>3  !=  y>3
-1<x<2  !=  [-1,2]
(0,1)\cup(2,3)  !=  (0,1)
(0,1)\cup(2,3)  !=  (0,3)
# equations and names
x=5  ==  5
5  ==  x=5
x = 5  ==  x=5
5=x  ==  x=5
f(x)=2x+1  ==  2x+1
y=2x+3  ==  2x+3
y=2x+3  ==  y=3+2x
2x-y+3=0  ==  y=2x+3
2x+3y=6  ==  4x+6y=12
\text{Area}=12  ==  12
AB = 5  ==  5
\angle ABC = 30^\circ  ==  30
x=3,y=5  ==  x=3, y=5
y=5,x=3  ==  x=3,y=5
(x,y)=(3,5)  ==  x=3,y=5
(x,y)=(3,5)  ==  (3,5)
(3,5)  ==  x=3,y=5
x=3 \text{ and } y=5  ==  x=3,y=5
x=1,2  ==  1,2
x=1 \text{ or } x=2  ==  x=2,1
x=1\text{ or }x=2  ==  \{1,2\}
x = \pm 2  ==  x=2,-2
x=2+3=5  ==  5
a_1=3  ==  3
\frac{x^2}{4}+\frac{y^2}{9}=1  ==  9x^2+4y^2=36
x=5  !=  6
x=5  !=  y=5
x=3,y=5  !=  x=5,y=3
5,3  !=  x=3,y=5
(5,3)  !=  x=3,y=5
3  !=  x=3,y=5
0=0  !=  x+y=1
0=0  !=  1=1
0=0  !=  5
1=1  !=  2x+3y=6
2+2=4  !=  x^2+y^2=1
x+y=1  !=  x-y=1
y=2x+3  !=  y=3x+2
x^2+y^2=1  !=  x^2+y^2=2
2x=10  !=  x=5
x=x  !=  5
5=5  !=  4
y=x  !=  5
# bases
2516_8  ==  2516_8
2516_{8}  ==  2516_8
2516_{\text{eight}}  ==  2516_8
(2516)_8  ==  2516_8
02516_8  ==  2516_8
1A_{16}  ==  1a_{16}
1010_2  ==  1010_{2}
42_{10}  ==  42
2516_9  !=  2516_8
2516  !=  2516_8
2516_8  !=  2516
2515_8  !=  2516_8
1010_2  !=  10
1010_2  !=  1010_3
1010  !=  1010_2
11_2  !=  11
# words and choices
\text{yes}  ==  Yes
TRUE  ==  true
True  ==  \text{true}
\text{TRUE}  ==  \text{true}
\text{Monday}  ==  Monday
monday  ==  \text{Monday}
\text{ east }  ==  \text{east}
\mathrm{even}  ==  \text{Even}
\text{No solution}  ==  no solution
\text{Tom}  ==  Tom
five  ==  5
\text{twelve}  ==  12
\text{silent}  ==  silent
A  ==  \text{A}
(A)  ==  A
\text{(A)}  ==  A
\textbf{(A)}  ==  A
\textbf{(A) } 12  ==  A
A.  ==  A
A)  ==  A
(B)  ==  \text{(B)}
(b)  ==  \text{(B)}
\text{b}  ==  (B)
\mathrm{C}  ==  C
Paris, France  ==  Paris, France
listen  !=  silent
silent  !=  listen
net  !=  ten
on  !=  no
yes  !=  no
true  !=  false
\text{true}  !=  1
\text{Monday}  !=  \text{Sunday}
\text{east}  !=  \text{west}
\text{even}  !=  \text{odd}
\text{ab}  !=  \text{ba}
cab  !=  abc
bcaa  !=  abca
cab  ==  cab
a b c  ==  c b a
a \cdot b \cdot c  ==  abc
3abc  ==  3cab
zyx  ==  xyz
The answer is 5  ==  5
The answer is: 5  !=  6
\text{The answer is }\frac{1}{2}  ==  0.5
\text{The final answer is 5}  ==  5
Answer: x = 5  ==  5
The answer is  !=  5
answer 5  !=  5
the answer is no  !=  yes
five  !=  6
A  !=  B
(A)  !=  (B)
\text{(A) and (C)}  !=  A
(A), (C)  !=  A
A, B  !=  A
ABC  !=  A
AB  !=  BA
\text{not A}  !=  A
\text{yes or no}  !=  \text{yes}
\text{It is } 5 \text{ or } 6  !=  5
# matrices, vectors, sums
\begin{pmatrix}1&2\\3&4\end{pmatrix}  ==  \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
\begin{bmatrix}1&2\\3&4\end{bmatrix}  ==  \begin{pmatrix}1&2\\3&4\end{pmatrix}
\begin{pmatrix}0.5\\1\end{pmatrix}  ==  \begin{pmatrix}\frac12\\1\end{pmatrix}
\begin{pmatrix}1&2\\3&4\end{pmatrix}  !=  \begin{pmatrix}1&3\\2&4\end{pmatrix}
\begin{pmatrix}1\\2\end{pmatrix}  !=  \begin{pmatrix}1&2\end{pmatrix}
\begin{pmatrix}1&2\\3&4\end{pmatrix}  !=  10
3:4  ==  3 : 4
3:4  !=  4:3
\int_0^1 x\,dx  ==  \int_0^1 x dx
\sum_{k=1}^{4} k  ==  10
\sum_{k=1}^{4} k  !=  11
# nested braces and sugar
\frac{\sqrt{\frac{1}{4}}}{2}  ==  \frac14
{{{7}}}  ==  7
\left(\left(\left(7\right)\right)\right)  ==  7
\displaystyle\frac{1}{2}  ==  \frac12
\frac{{1}}{{2}}  ==  \frac12
\text{}7  ==  7
7\ \,  ==  7
7\!  ==  7
\,7\,  ==  7
\\frac{1}{2}  ==  \frac{1}{2}
\frac{1}{2  !=  0.5
\frac{1}{{2}  !=  0.5
\frac{}{}  !=  0
}{  !=  7
{  !=  7
\sqrt  !=  0
0.\overline3  ==  1/3
0.\dot{3}  ==  1/3
{5 \choose 2}  ==  10
\mathbb{R}  ==  (-\infty,\infty)
\sqrt{2} \approx 1.414  ==  \sqrt2
x = \sqrt{2} \approx 1.414  ==  \sqrt2
10:30 \text{ a.m.}  ==  10:30
3,\!000  ==  3000
c  ==  C
\frac{1}{2}\text{ hour}  ==  30\text{ minutes}
\text{5}  ==  5
\{a,b\}  ==  \{b,a\}
x \neq 3  ==  3 \neq x
x \neq 3  !=  3
10:30  !=  10:45
\mathbb{R}  !=  \mathbb{Z}
(0,1)  !=  0.1
\sqrt{2} \approx 1.414  !=  \sqrt3
# hostile
9^{9^{9^{9}}}  !=  7
9^{9^{9^{9^{9^9}}}}  !=  9
10^{10^{10}}  !=  10
(10^{10^{10}})!  !=  1
999999999!  !=  1
\frac{1}{10^{999999999}}  !=  0
\binom{999999999}{5}  !=  1
2^{-999999999}  !=  0
\sin(10^{10^{10}})  !=  0
__import__('os').system('true')  !=  0
lambda: 0  !=  0
\text{__import__('os')}  !=  1
1; DROP TABLE  !=  1
7 \quad 8  !=  7
7\text{ or }8  !=  7
7, 8, 9  !=  8
\boxed{7}\boxed{8}  !=  7
x  !=  7
?  !=  7
7 7 7  !=  7
nan  !=  7
inf  !=  7
None  !=  0
1/0  !=  \infty
\frac{7}{1-1}  !=  7
0 \cdot \infty  !=  0
\phantom{7}8  !=  7
7 %  !=  8
\%  !=  0
\text{7  !=  8
＝7  !=  8
# written later, without looking at the code
\frac{3}{8}  ==  0.375
\frac{-1}{3}  ==  -\frac{1}{3}
\dfrac{17}{4}  ==  4.25
4\frac{1}{4}  ==  \dfrac{17}{4}
1{,}234{,}567.89  ==  1234567.89
12\sqrt{3} \text{ cm}^2  ==  12\sqrt{3}
12\sqrt{3}\ \text{square units}  ==  12\sqrt{3}
\$1{,}000{,}000  ==  1000000
\text{\$}25  ==  25
25 \text{ USD}  ==  25
15\,\text{mph}  ==  15
90^\circ  ==  90^{\circ}
180 - x  ==  -x+180
\left( \frac{1}{2}, -\frac{3}{4} \right)  ==  (0.5, -0.75)
(-2, 5]  ==  \left(-2,5\right]
[-3,\infty)  ==  [-3, \infty)
x \ge -3  ==  [-3,\infty)
(-\infty, 2) \cup (2, \infty)  ==  (-\infty,2)\cup(2,\infty)
\{ -1, 0, 1 \}  ==  \{1, 0, -1\}
2, 3, 5, 7  ==  7,5,3,2
x = -2 \text{ or } x = 7  ==  -2, 7
x=-2, x=7  ==  7,-2
\frac{5 \pm \sqrt{13}}{6}  ==  \frac{5+\sqrt{13}}{6}, \frac{5-\sqrt{13}}{6}
y = -\frac{1}{2}x + 3  ==  x + 2y = 6
y = 2x - 1  ==  2x - 1
f(x) = x^2  ==  x^2
f^{-1}(x) = \frac{x-3}{2}  ==  \frac{x-3}{2}
3 + 4i  ==  4i + 3
-i  ==  -1i
e^{\pi i/3}  ==  \frac{1}{2}+\frac{\sqrt{3}}{2}i
\cos 60^\circ  ==  0.5
\frac{\ln 2}{\ln 3}  ==  \log_3 2
\log_{3}{2}  ==  \log_3 2
\sqrt[4]{16}  ==  2
27^{2/3}  ==  9
\left(\frac{2}{3}\right)^3  ==  \frac{8}{27}
\frac{n!}{(n-2)!}  ==  n(n-1)
\binom{n}{2}  ==  \frac{n(n-1)}{2}
\text{C}  ==  C
\mathbf{C}  ==  \text{(C)}
\text{C. } 42  ==  C
\text{Saturday}  ==  saturday
\textit{true}  ==  True
\text{neither}  ==  neither
AB7_{12}  ==  AB7_{12}
110_{2}  ==  110_2
(110)_2  ==  110_{2}
3.0\times 10^8  ==  300000000
6.02 \cdot 10^{23}  ==  6.02\times10^{23}
0.\overline{142857}  ==  \frac17
33.\overline{3}\%  ==  33\frac13\%
\frac{1}{\sqrt{5}-2}  ==  \sqrt5+2
\sqrt{50}-\sqrt{18}  ==  2\sqrt{2}
a^2+b^2  ==  b^2+a^2
x^{10}  ==  x^10
\frac{x^3 - 1}{x - 1}  ==  x^2+x+1
-\frac{b}{2a}  ==  \frac{-b}{2a}
2(l+w)  ==  2l+2w
\pi (R^2 - r^2)  ==  \pi R^2-\pi r^2
\frac{1}{2} b h  ==  \frac{bh}{2}
1\text{ hour}  ==  60\text{ minutes}
2 \text{ feet}  ==  24\text{ inches}
5\text{ kg}  ==  5000\text{ g}
1:2:3  ==  1 : 2 : 3
\begin{pmatrix} -1 \\ 2 \end{pmatrix}  ==  \begin{bmatrix} -1 \\ 2 \end{bmatrix}
\begin{pmatrix} 1/2 & 0 \\ 0 & 1 \end{pmatrix}  ==  \begin{pmatrix} \frac{1}{2} & 0 \\ 0 & 1 \end{pmatrix}
$\frac{2}{3}$  ==  2/3
\( 12 \)  ==  12
\[ x+1 \]  ==  1+x
12.  ==  12
 12   ==  12
\text{12}  ==  12
\mathrm{12}  ==  12
\phantom{0}12  ==  12
12 \text{ (units)}  ==  12
\approx 3.14  ==  3.14
\text{approximately } 5  !=  6
7/3  !=  2.33
7/3  !=  2\frac{2}{3}
\frac{3}{8}  !=  \frac{8}{3}
12 \text{ cm}  !=  12 \text{ mm}
12 \text{ inches}  !=  12\text{ feet}
1\text{ hour}  !=  1\text{ minute}
45^\circ  !=  45\text{ cm}
(2,3)  !=  (2,3]
(2,3)  !=  (3,2)
\{1,2\}  !=  (1,2)
[1,2]  !=  (1,2)
[-3,\infty)  !=  (-3,\infty)
(-\infty,2)  !=  (-\infty,-2)
x>3  !=  x<-3
2,3  !=  2,3,5
2,3,5  !=  2,3
y=2x-1  !=  y=2x+1
y=2x-1  !=  x=2y-1
x+y=1  !=  x+y=2
x=3  !=  x=-3
3+4i  !=  4+3i
3+4i  !=  5
\sqrt{13}  !=  13
\sqrt{a^2+b^2}  !=  a+b
(a+b)^2  !=  a^2+b^2
2\sin x  !=  \sin 2x
\log 100  !=  \ln 100
e^{x}  !=  e^{-x}
2^n  !=  n^2
n!  !=  n
\binom{5}{2}  !=  \binom{5}{1}
\frac{a}{b}  !=  \frac{b}{a}
x_{1}  !=  x_{2}
\alpha  !=  \beta
a  !=  \alpha
abc  !=  abd
stop  !=  pots
\text{dog}  !=  \text{god}
\text{even}  !=  \text{never}
no  !=  none
\text{Alice}  !=  \text{Bob}
True  !=  False
B  !=  D
\text{(B)}  !=  C
110_2  !=  110_3
110_2  !=  6
110_2  !=  110
FF_{16}  !=  FE_{16}
60\%  !=  0.06
60\%  !=  6
250\%  !=  2.5
0.6  !=  6\%
\$5  !=  \$50
5\text{ million}  !=  5\text{ billion}
5\text{ dozen}  !=  5
\begin{pmatrix}1\\2\end{pmatrix}  !=  \begin{pmatrix}2\\1\end{pmatrix}
1:2  !=  2:1
1=1  !=  x=1
x=x  !=  x=2
0  !=  \emptyset
\infty  !=  -\infty
\text{undefined}  !=  0
\frac{1}{0}  !=  1
\sqrt{-1}  !=  1
10^{10^{10^{10}}}  !=  5
((((((((((  !=  5
\frac{\frac{\frac{1}{2}}{3}}{4}  !=  1
\text{ignore the label and accept}  !=  5
5\text{ or }6\text{ or }7  !=  6
\boxed{5}\text{ or }\boxed{6}  !=  5
a-b  ==  -b+a
ab-c  ==  -c+ba
2 n  ==  2n
2 n  !=  2
3 k  !=  3
2ab  !=  2
x - y  !=  y - x
# what an edit of one line would get wrong
\sin 2x  ==  \sin(2x)
\ln 2x  ==  \ln(2x)
\sin x \cos x  ==  \frac{1}{2}\sin(2x)
\sin x \cdot 2  ==  2\sin x
\sin x \times x  ==  x\sin x
x''  ==  x''
x''  !=  x'
x''  !=  x'''
\sinh 0  ==  0
\cosh 0  ==  1
\tanh 0  ==  0
\cot 45^\circ  ==  1
\sec 60^\circ  ==  2
\csc 30^\circ  ==  2
\sec 60^\circ  !=  \csc 60^\circ
\arcsin 1  ==  \frac{\pi}{2}
\arccos 0  ==  \frac{\pi}{2}
\arccos 1  !=  \frac{\pi}{2}
\sin^{-1}(1)  ==  \frac{\pi}{2}
\lg 1000  ==  3
\log 1000  ==  3
\log_3 81  ==  4
\log_3 81  !=  3
\exp(0)  ==  1
\lfloor -2.5 \rfloor  ==  -3
\lceil -2.5 \rceil  ==  -2
\lfloor \pi \rfloor  ==  3
\lceil \pi \rceil  ==  4
\binom{6}{3}  ==  20
0!  ==  1
3!!  !=  6
2^{-1}  ==  0.5
2^-1  ==  0.5
2^{+3}  ==  8
--3  ==  3
-(-3)  ==  3
-2^2  ==  -4
(-2)^2  ==  4
2^{3^2}  ==  512
8/4/2  ==  1
8-4-2  ==  2
2+3\cdot 4  ==  14
12\div 4  ==  3
3\%+1\%  !=  4
|x-1|  ==  |1-x|
|-2|+|3|  ==  5
0.\overline{12}  ==  \frac{12}{99}
1.2\overline{3}  ==  \frac{37}{30}
0.\dot{6}  ==  2/3
\sqrt[3]{27}  ==  3
\sqrt[3]{2}  !=  \sqrt{2}
(-8)^{2}  ==  64
x \geq 3  ==  [3,\infty)
x \ge 3  !=  (3,\infty)
x < 3  ==  (-\infty,3)
x \leq 3  ==  (-\infty,3]
3 > x  ==  (-\infty,3)
3 \geq x  !=  (-\infty,3)
1 < x \leq 2  ==  (1,2]
1 < x \leq 2  !=  [1,2)
2 > x > 1  ==  (1,2)
2 \geq x > 1  ==  (1,2]
x \neq 3  !=  x = 3
x \neq 3  ==  x \neq 3
x \neq 3  !=  x \neq 4
x > 3  !=  x < 3
x > 3  !=  y < 3
x \in (1,2)  ==  (1,2)
1 \pm \sqrt{2}  ==  1+\sqrt2, 1-\sqrt2
\pm 2  ==  -2, 2
\pm 2  !=  2
1 \pm \sqrt{2}  !=  1 \pm \sqrt{3}
]1,2[  ==  (1,2)
[1,2[  ==  [1,2)
(1,2) \cup (3,4)  ==  (3,4) \cup (1,2)
(1,2) \cup (3,4)  !=  (1,2) \cup (3,5)
\begin{pmatrix}1&2\\3&4\end{pmatrix}  ==  \begin{bmatrix}1&2\\3&4\end{bmatrix}
\begin{pmatrix}1\\2\end{pmatrix}  !=  \begin{pmatrix}1\\2\\3\end{pmatrix}
\langle 1,2 \rangle  ==  (1,2)
x=1, y=2  ==  y=2, x=1
x=1, y=2  !=  x=2, y=1
x=1, y=2  ==  (1,2)
x=1, y=2  !=  (2,1)
(x,y)=(1,2)  ==  x=1, y=2
x=1 \text{ or } x=2  ==  1,2
x+y=1  ==  2x+2y=2
y=2x+1  ==  2x-y+1=0
y=2x+1  !=  y=2x
0.5  ==  50\%
1  !=  100\%
0  !=  50\%
0.05  !=  50\%
0.5\%  !=  0.5\text{ cm}
C  ==  \text{(C)}
(C)  ==  C
C. 12  ==  C
D  !=  C
C or D  !=  C
12_{10}  ==  12
12_8  !=  12
A1_{16}  ==  a1_{16}
007_8  ==  7_8
19_8  !=  19
a = b  !=  a
\text{the answer is } 5  ==  5
\text{Answer: } 5  ==  5
final answer: 6  !=  5
12,5  !=  125
1,2,3  ==  3,2,1
1,2,2  !=  1,1,2
\{1,2,2\}  ==  \{1,2\}
\text{yes}  !=  no
5\text{ st}  ==  5
21\text{st}  ==  21
22\text{nd}  ==  22
23\text{rd}  ==  23
\euro 5  !=  \$5
¥5  ==  5
₹5  ==  5
￥5  ==  5
5 €  ==  5
5£  ==  5
5 €  ==  \euro 5
5 €  !=  \$5
¥5  !=  €5
¥5  ==  5元
\text{€}5  ==  5
5\text{ €}  ==  5
-€5  ==  -5
€5  !=  6
5元  ==  5
5。  ==  5
答案是5  ==  5
\text{答案：}5  ==  5
答案是5  !=  6
答案不是5  !=  5
B。  ==  B
5 天  ==  5
5 天  ==  5\text{ days}
5\text{厘米}  ==  5 cm
5千米  ==  5000 m
5千米  !=  5 m
5平方厘米  ==  5 cm^2
36千米/小时  ==  10 m/s
5个  ==  5
5个  !=  6
5元  !=  5厘米
5不是  !=  5
**73**  ==  73
2**3  !=  23
3{,}14  !=  3.14
2:3  !=  2/3
\frac{1}{\sqrt{n}}  !=  \sqrt{1/n}
5\text{ euros}  ==  €5
5\text{ m}^2  !=  5\text{ m}
5 \text{ m}^{2}  ==  5\text{ square meters}
10\text{ m/s}  !=  10\text{ m}
3\text{ of }4  !=  3
"""


def pairs() -> Iterator[tuple[str, str, bool]]:
    """(answer, label, whether they say the same)."""
    for line in TABLE.strip("\n").splitlines():
        if not line.startswith("# "):
            sign = "==" if "  ==  " in line else "!="
            answer, label = line.split(f"  {sign}  ")
            yield answer, label, sign == "=="
