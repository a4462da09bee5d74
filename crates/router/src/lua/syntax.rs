//! Single-pass parser for Lua 5.1, which collects the global names of a text and its uses of `redis` and `KEYS`.
//!
//! It builds no tree, because only [`Facts`] are needed. It may accept more than Lua, since servers refuse the rest. It
//! must never misinterpret a text that a server accepts. So scopes, strings and comments follow Lua exactly, and
//! unknown grammar ends the parse.

use std::collections::{BTreeSet, HashMap};

use switchyard_resp::command::{CommandTable, Keys};

use super::rules::rule;

/// Maximum nesting of blocks and expressions in Lua.
const DEPTH_MAX: u32 = 200;
/// Maximum local variables per function in Lua.
const LOCALS_MAX: usize = 200;

const KEYWORDS: [&str; 21] = [
    "and", "break", "do", "else", "elseif", "end", "false", "for", "function", "if", "in", "local", "nil", "not", "or",
    "repeat", "return", "then", "true", "until", "while",
];

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Token<'a> {
    Name(&'a [u8]),
    Keyword(&'static str),
    /// String. Has its bytes if it contains no escapes and no long brackets.
    Text(Option<&'a [u8]>),
    Number,
    Symbol(&'static str),
    End,
}

/// Properties of a text that affect its use of keys.
#[derive(Debug, Default)]
pub(super) struct Facts<'a> {
    /// Names used without a declaration.
    pub(super) globals: BTreeSet<&'a [u8]>,
    /// Members of `redis` that are accessed by name.
    pub(super) members: BTreeSet<&'a [u8]>,
    /// Literal command names in `redis.call` and `redis.pcall`, in lower case.
    pub(super) commands: BTreeSet<String>,
    /// Command names as written in these calls.
    pub(super) spelled_commands: BTreeSet<String>,
    /// `redis` is used otherwise than by a named member.
    pub(super) redis_escapes: bool,
    /// `redis.call` is used without a literal command name.
    pub(super) calls_any: bool,
    /// `KEYS` is used otherwise than to read an element or its length.
    pub(super) keys_escape: bool,
    /// A call has a key other than `KEYS[...]`.
    pub(super) other_keys: bool,
    /// Assigns to `redis` or to a member of it.
    pub(super) changes_redis: bool,
    /// Assigns to a global name other than `KEYS` and `ARGV`.
    pub(super) changes_globals: bool,
}

/// Kind of an expression, as an argument of a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Shape<'a> {
    Literal(&'a [u8]),
    /// `KEYS[...]`, or a local variable for it.
    Key,
    /// `redis.call` or `redis.pcall` itself.
    RedisCall,
    /// A call or `...`: any number of values in the last position.
    Many,
    One,
}

/// Kind of a variable or a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Suffixed {
    Call,
    /// `KEYS[...]`, or a local variable for it.
    Key,
    /// `redis` or a member of it.
    OfRedis,
    /// `redis.call` or `redis.pcall`, not called.
    RedisCall,
    Variable,
    /// Expression in parentheses.
    Value,
}

/// Parses a text without its shebang. `None` on unknown syntax.
pub(super) fn read<'a>(text: &'a [u8], table: &'a CommandTable) -> Option<Facts<'a>> {
    let mut reader = Reader {
        text,
        at: 0,
        now: Token::End,
        ahead: None,
        depth: 0,
        locals: Vec::new(),
        aliases: Vec::new(),
        keys: Vec::new(),
        active: HashMap::new(),
        function: 0,
        facts: Facts::default(),
        table,
    };
    reader.advance()?;
    reader.block()?;
    (reader.now == Token::End).then_some(reader.facts)
}

struct Reader<'a> {
    text: &'a [u8],
    at: usize,
    now: Token<'a>,
    ahead: Option<Token<'a>>,
    depth: u32,
    /// Local variables in scope, innermost last.
    locals: Vec<&'a [u8]>,
    /// Indexes of the local variables that are other names of `redis.call` or `redis.pcall`.
    aliases: Vec<usize>,
    /// Indexes of the local variables that were declared as `KEYS[...]`. An assignment to one counts as one to `KEYS`.
    keys: Vec<usize>,
    /// Number of declarations of each name in scope.
    active: HashMap<&'a [u8], u32>,
    /// Start of the current function's locals.
    function: usize,
    facts: Facts<'a>,
    table: &'a CommandTable,
}

/// Tokens.
impl<'a> Reader<'a> {
    fn rest(&self) -> &'a [u8] {
        &self.text[self.at..]
    }

    /// Returns the level of a long bracket at the start, if there is one.
    fn long_level(rest: &[u8]) -> Option<usize> {
        let level = rest.get(1..)?.iter().take_while(|b| **b == b'=').count();
        (rest.get(level + 1) == Some(&b'[')).then_some(level)
    }

    /// Skips a long string or comment that starts here.
    fn skip_long(&mut self, level: usize) -> Option<()> {
        self.at += level + 2;
        let mut close = vec![b']'];
        close.extend(std::iter::repeat_n(b'=', level));
        close.push(b']');
        let rest = self.rest();
        let end = rest.windows(close.len()).position(|w| w == close)?;
        // Depending on its build, Lua 5.1 refuses or nests these.
        if level == 0 && rest[..end].windows(2).any(|w| w == b"[[") {
            return None;
        }
        self.at += end + close.len();
        Some(())
    }

    fn lex(&mut self) -> Option<Token<'a>> {
        loop {
            let rest = self.rest();
            let Some(&byte) = rest.first() else { return Some(Token::End) };
            match byte {
                b' ' | b'\t' | b'\n' | b'\r' | 0x0b | 0x0c => self.at += 1,
                b'-' if rest.starts_with(b"--") => {
                    self.at += 2;
                    match self.rest().first().filter(|b| **b == b'[').and_then(|_| Self::long_level(self.rest())) {
                        Some(level) => self.skip_long(level)?,
                        // A line ends at either byte.
                        None => self.at += self.rest().iter().take_while(|b| !matches!(b, b'\n' | b'\r')).count(),
                    }
                }
                b'a'..=b'z' | b'A'..=b'Z' | b'_' => {
                    let len = rest.iter().take_while(|b| b.is_ascii_alphanumeric() || **b == b'_').count();
                    self.at += len;
                    let word = &rest[..len];
                    return Some(match KEYWORDS.iter().find(|k| k.as_bytes() == word) {
                        Some(keyword) => Token::Keyword(keyword),
                        None => Token::Name(word),
                    });
                }
                b'0'..=b'9' => return Some(self.number()),
                b'.' if rest.get(1).is_some_and(u8::is_ascii_digit) => return Some(self.number()),
                b'"' | b'\'' => return self.string(byte),
                b'[' => {
                    if let Some(level) = Self::long_level(rest) {
                        self.skip_long(level)?;
                        return Some(Token::Text(None));
                    }
                    self.at += 1;
                    return Some(Token::Symbol("["));
                }
                _ => {
                    const SYMBOLS: [&str; 25] = [
                        "...", "..", "==", "~=", "<=", ">=", "+", "-", "*", "/", "%", "^", "#", "<", ">", "=", "(",
                        ")", "{", "}", "]", ";", ":", ",", ".",
                    ];
                    let symbol = SYMBOLS.iter().find(|s| rest.starts_with(s.as_bytes()))?;
                    self.at += symbol.len();
                    return Some(Token::Symbol(symbol));
                }
            }
        }
    }

    /// Follows Lua's `read_numeral`. Servers refuse malformed numbers.
    fn number(&mut self) -> Token<'a> {
        let digits = self.rest().iter().take_while(|b| b.is_ascii_digit() || **b == b'.').count();
        self.at += digits;
        if matches!(self.rest().first(), Some(b'e' | b'E')) {
            self.at += 1;
            self.at += usize::from(matches!(self.rest().first(), Some(b'+' | b'-')));
        }
        self.at += self.rest().iter().take_while(|b| b.is_ascii_alphanumeric() || **b == b'_').count();
        Token::Number
    }

    fn string(&mut self, quote: u8) -> Option<Token<'a>> {
        let rest = self.rest();
        let mut end = 1;
        let mut escaped = false;
        loop {
            match *rest.get(end)? {
                b'\n' | b'\r' => return None,
                b'\\' => {
                    escaped = true;
                    // A line continuation may have two bytes.
                    end += if matches!(rest.get(end + 1..end + 3), Some(b"\r\n" | b"\n\r")) { 3 } else { 2 };
                }
                byte if byte == quote => break,
                _ => end += 1,
            }
        }
        self.at += end + 1;
        Some(Token::Text((!escaped).then_some(&rest[1..end])))
    }

    fn advance(&mut self) -> Option<Token<'a>> {
        let next = match self.ahead.take() {
            Some(token) => token,
            None => self.lex()?,
        };
        Some(std::mem::replace(&mut self.now, next))
    }

    fn ahead(&mut self) -> Option<Token<'a>> {
        if self.ahead.is_none() {
            self.ahead = Some(self.lex()?);
        }
        self.ahead
    }

    fn accept(&mut self, token: Token<'_>) -> Option<bool> {
        let is = self.now == token;
        if is {
            self.advance()?;
        }
        Some(is)
    }

    fn symbol(&mut self, symbol: &'static str) -> Option<()> {
        self.accept(Token::Symbol(symbol))?.then_some(())
    }

    fn keyword(&mut self, keyword: &'static str) -> Option<()> {
        self.accept(Token::Keyword(keyword))?.then_some(())
    }

    fn name(&mut self) -> Option<&'a [u8]> {
        match self.advance()? {
            Token::Name(name) => Some(name),
            _ => None,
        }
    }
}

/// Scopes.
impl<'a> Reader<'a> {
    fn enter(&mut self) -> Option<()> {
        self.depth += 1;
        (self.depth <= DEPTH_MAX).then_some(())
    }

    fn declare(&mut self, name: &'a [u8]) -> Option<()> {
        self.locals.push(name);
        *self.active.entry(name).or_default() += 1;
        (self.locals.len() - self.function <= LOCALS_MAX).then_some(())
    }

    fn close(&mut self, mark: usize) {
        self.aliases.retain(|at| *at < mark);
        self.keys.retain(|at| *at < mark);
        for name in self.locals.drain(mark..) {
            if let Some(count) = self.active.get_mut(name) {
                *count -= 1;
            }
        }
    }

    fn is_global(&self, name: &[u8]) -> bool {
        self.active.get(name).is_none_or(|count| *count == 0)
    }
}

/// Statements.
impl<'a> Reader<'a> {
    fn ends_block(&self) -> bool {
        matches!(self.now, Token::End | Token::Keyword("end" | "else" | "elseif" | "until"))
    }

    fn block(&mut self) -> Option<()> {
        let mark = self.locals.len();
        self.statements()?;
        self.close(mark);
        Some(())
    }

    /// Parses a block whose scope the caller closes.
    fn statements(&mut self) -> Option<()> {
        self.enter()?;
        while !self.ends_block() {
            let last = self.statement()?;
            self.accept(Token::Symbol(";"))?;
            if last {
                self.ends_block().then_some(())?;
            }
        }
        self.depth -= 1;
        Some(())
    }

    /// Parses a statement. Returns whether it must be the last of its block.
    fn statement(&mut self) -> Option<bool> {
        let Token::Keyword(word) = self.now else {
            self.expression_statement()?;
            return Some(false);
        };
        self.advance()?;
        match word {
            "if" => {
                loop {
                    self.expression()?;
                    self.keyword("then")?;
                    self.block()?;
                    if !self.accept(Token::Keyword("elseif"))? {
                        break;
                    }
                }
                if self.accept(Token::Keyword("else"))? {
                    self.block()?;
                }
                self.keyword("end")?;
            }
            "while" => {
                self.expression()?;
                self.keyword("do")?;
                self.block()?;
                self.keyword("end")?;
            }
            "do" => {
                self.block()?;
                self.keyword("end")?;
            }
            "for" => self.for_loop()?,
            "repeat" => {
                let mark = self.locals.len();
                self.statements()?;
                self.keyword("until")?;
                self.expression()?;
                self.close(mark);
            }
            "function" => self.function_statement()?,
            "local" => {
                if self.accept(Token::Keyword("function"))? {
                    let name = self.name()?;
                    self.declare(name)?;
                    self.function_body(false)?;
                } else {
                    let names = self.names()?;
                    let mark = self.locals.len();
                    let mut is_alias = false;
                    let mut values = Vec::new();
                    if self.accept(Token::Symbol("="))? {
                        let first = self.any_expression()?;
                        is_alias = first == Shape::RedisCall && names.len() == 1 && self.now != Token::Symbol(",");
                        self.facts.calls_any |= first == Shape::RedisCall && !is_alias;
                        values.push(first);
                        while self.accept(Token::Symbol(","))? {
                            values.push(self.expression()?);
                        }
                    }
                    values.truncate(names.len());
                    names.into_iter().try_for_each(|name| self.declare(name))?;
                    if is_alias {
                        self.aliases.push(mark);
                    }
                    let keys = values.iter().enumerate().filter(|(_, value)| **value == Shape::Key);
                    self.keys.extend(keys.map(|(place, _)| mark + place));
                }
            }
            "return" => {
                if !self.ends_block() && self.now != Token::Symbol(";") {
                    self.expressions()?;
                }
                return Some(true);
            }
            "break" => return Some(true),
            _ => return None,
        }
        Some(false)
    }

    fn names(&mut self) -> Option<Vec<&'a [u8]>> {
        let mut names = vec![self.name()?];
        while self.accept(Token::Symbol(","))? {
            names.push(self.name()?);
        }
        Some(names)
    }

    fn for_loop(&mut self) -> Option<()> {
        let names = self.names()?;
        let is_numeric = names.len() == 1 && self.accept(Token::Symbol("="))?;
        if !is_numeric {
            self.keyword("in")?;
        }
        let is_of_keys = !is_numeric && self.loops_over_keys()?;
        if !is_of_keys {
            self.expressions()?;
        }
        self.keyword("do")?;
        let mark = self.locals.len();
        let has_key = is_of_keys && names.len() > 1;
        names.into_iter().try_for_each(|name| self.declare(name))?;
        if has_key {
            self.keys.push(mark + 1);
        }
        self.block()?;
        self.close(mark);
        self.keyword("end")
    }

    /// Parses `ipairs(KEYS)` or `ipairs({KEYS[1], KEYS[2]})` before `do`, also with `pairs` and with local variables for
    /// the elements. Returns `false` at the same place before any other expression.
    fn loops_over_keys(&mut self) -> Option<bool> {
        let before = (self.at, self.now, self.ahead);
        let iterator = match self.now {
            Token::Name(name @ (b"ipairs" | b"pairs")) if self.is_global(name) => name,
            _ => return Some(false),
        };
        self.advance()?;
        let is_of_keys = self.accept(Token::Symbol("("))?
            && (self.accept_keys()? || self.accept_list_of_keys()?)
            && self.accept(Token::Symbol(")"))?
            && self.now == Token::Keyword("do");
        if is_of_keys {
            self.facts.globals.insert(iterator);
        } else {
            (self.at, self.now, self.ahead) = before;
        }
        Some(is_of_keys)
    }

    fn accept_keys(&mut self) -> Option<bool> {
        let Token::Name(name) = self.now else { return Some(false) };
        let is_keys = self.is_keys(name);
        if is_keys {
            self.advance()?;
            self.facts.globals.insert(name);
        }
        Some(is_keys)
    }

    /// Accepts `{KEYS[1], key}`, without nested expressions: callers may parse it twice.
    fn accept_list_of_keys(&mut self) -> Option<bool> {
        if !self.accept(Token::Symbol("{"))? {
            return Some(false);
        }
        loop {
            let is_key = match self.now {
                Token::Name(name) if self.is_key(name) => self.advance().is_some(),
                _ => {
                    self.accept_keys()?
                        && self.accept(Token::Symbol("["))?
                        && self.accept(Token::Number)?
                        && self.accept(Token::Symbol("]"))?
                }
            };
            if !is_key || !self.accept(Token::Symbol(","))? {
                return Some(is_key && self.accept(Token::Symbol("}"))?);
            }
        }
    }

    fn function_statement(&mut self) -> Option<()> {
        let name = self.name()?;
        let of_redis = self.note_name(name);
        self.facts.changes_redis |= of_redis;
        self.facts.changes_globals |=
            self.is_global(name) && !matches!(name, b"KEYS" | b"ARGV") && self.now == Token::Symbol("(");
        self.facts.keys_escape |= self.is_keys(name) || self.is_key(name);
        while self.accept(Token::Symbol("."))? {
            self.name()?;
        }
        let method = self.accept(Token::Symbol(":"))?;
        if method {
            self.name()?;
        }
        self.function_body(method)
    }

    fn function_body(&mut self, method: bool) -> Option<()> {
        let (mark, outer) = (self.locals.len(), self.function);
        self.function = mark;
        if method {
            self.declare(b"self")?;
        }
        self.symbol("(")?;
        while self.now != Token::Symbol(")") {
            if self.accept(Token::Symbol("..."))? {
                // Lua 5.1 stores the arguments of such a function in `arg`.
                self.declare(b"arg")?;
                break;
            }
            let name = self.name()?;
            self.declare(name)?;
            if !self.accept(Token::Symbol(","))? {
                break;
            }
        }
        self.symbol(")")?;
        self.block()?;
        self.keyword("end")?;
        self.close(mark);
        self.function = outer;
        Some(())
    }

    fn expression_statement(&mut self) -> Option<()> {
        let mut target = self.target()?;
        if target == Suffixed::Call {
            return Some(());
        }
        loop {
            match target {
                Suffixed::Key => self.facts.keys_escape = true,
                Suffixed::OfRedis | Suffixed::RedisCall => self.facts.changes_redis = true,
                Suffixed::Variable => {}
                Suffixed::Call | Suffixed::Value => return None,
            }
            if !self.accept(Token::Symbol(","))? {
                break;
            }
            target = self.target()?;
        }
        self.symbol("=")?;
        self.expressions()
    }

    /// Parses a call or a part of the left side of an assignment.
    fn target(&mut self) -> Option<Suffixed> {
        if let Token::Name(name) = self.now
            && !matches!(name, b"KEYS" | b"ARGV")
            && self.is_global(name)
        {
            self.facts.changes_globals |= matches!(self.ahead()?, Token::Symbol("=" | ","));
        }
        self.suffixed()
    }
}

/// Expressions.
impl<'a> Reader<'a> {
    fn expressions(&mut self) -> Option<()> {
        self.expression()?;
        while self.accept(Token::Symbol(","))? {
            self.expression()?;
        }
        Some(())
    }

    fn expression(&mut self) -> Option<Shape<'a>> {
        Some(match self.any_expression()? {
            Shape::RedisCall => {
                self.facts.calls_any = true;
                Shape::One
            }
            shape => shape,
        })
    }

    /// Parses an expression, which may be `redis.call` itself. Ignores precedence, which does not affect the used names.
    fn any_expression(&mut self) -> Option<Shape<'a>> {
        self.enter()?;
        let mut shape = self.operand()?;
        while let Token::Symbol("+" | "-" | "*" | "/" | "%" | "^" | ".." | "==" | "~=" | "<" | "<=" | ">" | ">=")
        | Token::Keyword("and" | "or") = self.now
        {
            self.advance()?;
            let other = self.operand()?;
            self.facts.calls_any |= [shape, other].contains(&Shape::RedisCall);
            shape = Shape::One;
        }
        self.depth -= 1;
        Some(shape)
    }

    fn operand(&mut self) -> Option<Shape<'a>> {
        let mut shape = None;
        while let Token::Symbol("-" | "#") | Token::Keyword("not") = self.now {
            let counts = self.advance()? == Token::Symbol("#");
            shape = Some(Shape::One);
            if let Token::Name(name) = self.now
                && counts
                && self.is_keys(name)
                && !matches!(self.ahead()?, Token::Symbol("." | "[" | ":" | "(" | "{") | Token::Text(_))
            {
                self.facts.globals.insert(name);
                self.advance()?;
                return shape;
            }
        }
        let simple = self.simple()?;
        self.facts.calls_any |= shape.is_some() && simple == Shape::RedisCall;
        Some(shape.unwrap_or(simple))
    }

    fn simple(&mut self) -> Option<Shape<'a>> {
        match self.now {
            Token::Text(text) => {
                self.advance()?;
                Some(text.map_or(Shape::One, Shape::Literal))
            }
            Token::Number | Token::Keyword("nil" | "true" | "false") => {
                self.advance()?;
                Some(Shape::One)
            }
            Token::Symbol("...") => {
                self.advance()?;
                Some(Shape::Many)
            }
            Token::Symbol("{") => {
                self.constructor()?;
                Some(Shape::One)
            }
            Token::Keyword("function") => {
                self.advance()?;
                self.function_body(false)?;
                Some(Shape::One)
            }
            _ => Some(match self.suffixed()? {
                Suffixed::Call => Shape::Many,
                Suffixed::Key => Shape::Key,
                Suffixed::RedisCall => Shape::RedisCall,
                Suffixed::OfRedis | Suffixed::Variable | Suffixed::Value => Shape::One,
            }),
        }
    }

    fn constructor(&mut self) -> Option<()> {
        self.symbol("{")?;
        while self.now != Token::Symbol("}") {
            if self.accept(Token::Symbol("["))? {
                self.expression()?;
                self.symbol("]")?;
                self.symbol("=")?;
            } else if matches!(self.now, Token::Name(_)) && self.ahead()? == Token::Symbol("=") {
                self.advance()?;
                self.advance()?;
            }
            self.expression()?;
            if !(self.accept(Token::Symbol(","))? || self.accept(Token::Symbol(";"))?) {
                break;
            }
        }
        self.symbol("}")
    }

    /// Whether a name is a local variable for `redis.call`.
    fn is_alias(&self, name: &[u8]) -> bool {
        !self.aliases.is_empty()
            && self.locals.iter().rposition(|local| *local == name).is_some_and(|at| self.aliases.contains(&at))
    }

    /// Whether a name is a local variable for `KEYS[...]`.
    fn is_key(&self, name: &[u8]) -> bool {
        !self.keys.is_empty()
            && self.locals.iter().rposition(|local| *local == name).is_some_and(|at| self.keys.contains(&at))
    }

    fn is_keys(&self, name: &[u8]) -> bool {
        name == b"KEYS" && self.is_global(name)
    }

    /// Records the use of a name. Returns whether it is the global `redis` or `server`.
    fn note_name(&mut self, name: &'a [u8]) -> bool {
        if !self.is_global(name) {
            return false;
        }
        self.facts.globals.insert(name);
        matches!(name, b"redis" | b"server")
    }

    /// Parses a variable, a call, or an expression in parentheses, with all suffixes.
    fn suffixed(&mut self) -> Option<Suffixed> {
        let mut so_far = match self.now {
            Token::Symbol("(") => {
                self.advance()?;
                self.expression()?;
                self.symbol(")")?;
                Suffixed::Value
            }
            Token::Name(name) => {
                self.advance()?;
                if self.note_name(name) {
                    self.of_redis()?
                } else if self.is_keys(name) {
                    self.of_keys()?
                } else if self.is_alias(name) {
                    self.of_alias()?
                } else if self.is_key(name) {
                    Suffixed::Key
                } else {
                    Suffixed::Variable
                }
            }
            _ => return None,
        };
        loop {
            let is_suffix = matches!(self.now, Token::Symbol("." | "[" | ":" | "(" | "{") | Token::Text(_));
            self.facts.calls_any |= is_suffix && so_far == Suffixed::RedisCall;
            so_far = match self.now {
                Token::Symbol(".") => {
                    self.advance()?;
                    self.name()?;
                    Suffixed::Variable
                }
                Token::Symbol("[") => {
                    self.advance()?;
                    self.expression()?;
                    self.symbol("]")?;
                    Suffixed::Variable
                }
                Token::Symbol(":") => {
                    self.advance()?;
                    self.name()?;
                    self.arguments()?;
                    Suffixed::Call
                }
                Token::Symbol("(" | "{") | Token::Text(_) => {
                    self.arguments()?;
                    Suffixed::Call
                }
                _ => return Some(so_far),
            };
        }
    }

    fn arguments(&mut self) -> Option<Vec<Shape<'a>>> {
        if let Token::Text(_) = self.now {
            self.advance()?;
            return Some(vec![Shape::One]);
        }
        if self.now == Token::Symbol("{") {
            self.constructor()?;
            return Some(vec![Shape::One]);
        }
        self.symbol("(")?;
        let mut shapes = Vec::new();
        if self.now != Token::Symbol(")") {
            shapes.push(self.expression()?);
            while self.accept(Token::Symbol(","))? {
                shapes.push(self.expression()?);
            }
        }
        self.symbol(")")?;
        Some(shapes)
    }

    /// Continues after `KEYS`.
    fn of_keys(&mut self) -> Option<Suffixed> {
        if self.accept(Token::Symbol("["))? {
            self.expression()?;
            self.symbol("]")?;
            return Some(Suffixed::Key);
        }
        self.facts.keys_escape = true;
        Some(Suffixed::Variable)
    }

    /// Continues after `redis`.
    fn of_redis(&mut self) -> Option<Suffixed> {
        if !self.accept(Token::Symbol("."))? {
            self.facts.redis_escapes = true;
            return Some(Suffixed::OfRedis);
        }
        let member = self.name()?;
        self.facts.members.insert(member);
        if !matches!(member, b"call" | b"pcall") {
            return Some(Suffixed::OfRedis);
        }
        if self.now == Token::Symbol("(") { self.redis_call() } else { Some(Suffixed::RedisCall) }
    }

    /// Continues after a local variable for `redis.call`.
    fn of_alias(&mut self) -> Option<Suffixed> {
        if self.now == Token::Symbol("(") {
            return self.redis_call();
        }
        self.facts.calls_any = true;
        Some(Suffixed::Variable)
    }

    fn redis_call(&mut self) -> Option<Suffixed> {
        let shapes = self.arguments()?;
        self.note_call(&shapes);
        Some(Suffixed::Call)
    }

    fn note_call(&mut self, shapes: &[Shape<'a>]) {
        let literal = |at: usize| match shapes.get(at) {
            Some(Shape::Literal(text)) => std::str::from_utf8(text).ok().filter(|text| !text.contains('|')),
            _ => None,
        };
        if shapes.is_empty() {
            return; // the node replies with an error
        }
        let Some(name) = literal(0) else {
            self.facts.calls_any = true;
            return;
        };
        self.facts.commands.insert(name.to_ascii_lowercase());
        self.facts.spelled_commands.insert(name.to_owned());
        let command = self.table.by_name(name);
        let command = match (command, literal(1)) {
            (Some(container), Some(sub)) if container.is_container() && rule(container).is_none() => {
                self.table.by_name(&format!("{name}|{sub}"))
            }
            _ => command,
        };
        let is_key = |at: usize| shapes.get(at) == Some(&Shape::Key);
        let open = shapes.last() == Some(&Shape::Many);
        let declared = match command.and_then(rule) {
            Some(Keys::None) => true,
            Some(Keys::Range { first, last, step }) => {
                let (first, step) = (usize::from(*first), usize::from((*step).max(1)));
                match usize::try_from(*last) {
                    Ok(last) => (first..=last).step_by(step).all(|at| is_key(at) || at >= shapes.len() && !open),
                    Err(_) => {
                        let end = (shapes.len() + 1).saturating_sub(usize::from(last.unsigned_abs()));
                        !open && (first..end).step_by(step).all(is_key)
                    }
                }
            }
            _ => false,
        };
        self.facts.other_keys |= !declared;
    }
}
