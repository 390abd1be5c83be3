"""Chinese: words, line templates and question templates of the five domains, in parallel with the English ones.

``^`` stands for a word boundary. Words are made so that no two characters which meet at a boundary stand together in
any word: a tokenizer trained on the words cannot merge over their boundaries. Place names are built of few characters
because each distinct character costs the tokenizer entries of its own.
"""

from dataclasses import fields, replace

from longread.measure.reading.grammar import MARK, QUANTITIES, Attribute, Grammar, Tongue, pairs, words

FIRSTS = tuple(x + y for x in "东西南北金银青白云石龙松" for y in "山河湖港岭溪桥林岛湾")
SECONDS = words("""
    仓库 车站 码头 医院 学校 工厂 楼群 公寓 广场 市集 商铺 酒店 餐厅 剧院 球馆 泳池 花园 果园 农场 牧场
    机房 展馆 货场 泵站 电站 水塔 船坞 渡口 隧道 栈道 别墅 宿舍 礼堂 书店 药房 茶楼 诊所 报社 邮局 银行
""")
PERSONS = tuple(x + y for x in "李张刘陈杨赵周吴" for y in "明芳伟静")
PLACES = tuple(x + y for x in "安永平宁福泰和清" for y in "州阳城江")
MONTHS = tuple(str(month) for month in range(1, 13))

_CONTRACT = Grammar(
    head="第^{r}^条^ ",
    cite="第^{r}^条",
    lower=False,
    quoted=False,
    attributes=pairs("""
        percent: 违约^费率, 借款^费率, 租金^折扣, 利润^比例
        amount: 服务^费用, 清洁^费用, 供暖^费用, 每月^租金, 履约^押金, 维修^预算
        amount: 赔偿^上限, 保险^额度
        days: 通知^期限, 付款^期限, 宽限^期限, 维修^期限
        date: 交付^日期, 检查^日期, 续约^日期
        code: 账户^编号, 许可^编号
        person: 现场^经理, 首席^技师
        place: 仲裁^地点"""),
    lists=pairs("""
        person: 授权^代表, 持钥^人员
        place: 交付^地点, 存放^地点"""),
    facts=(
        "{h}{e}^的^{a}^为^{v}^。\n",
        "{h}对于^{e}^，双方^约定^{a}^为^{v}^。\n",
        "{h}就^{e}^而言^，{a}^应为^{v}^。\n",
    ),
    amended=(
        "{h}第^{n}^次^修订^：{e}^的^{a}^为^{v}^。\n",
        "{h}第^{n}^次^修订^：对于^{e}^，双方^约定^{a}^为^{v}^。\n",
    ),
    first=("{h}{e}^的^{a}^，双方^指定^{v}^。\n",),
    further=("{h}{e}^的^{a}^，除^{b}^外^，双方^指定^{v}^。\n",),
    fillers=(
        "{h}本^合同^的^通知^应^采用^书面^形式^。\n",
        "{h}未经^同意^，双方^不得^转让^权利^。\n",
        "{h}经营^一方^应^保持^{e}^完好^。\n",
        "{h}业主^一方^应^开放^{e}^。\n",
        "{h}个别^条款^无效^，不^影响^其余^条款^。\n",
        "{h}本^合同^适用^签署^地点^的^法律^。\n",
        "{h}关于^{e}^的^附件^属于^本^合同^。\n",
    ),
    headings=(
        "第^{n}^章^：费用^与^期限\n",
        "第^{n}^章^：经营^一方^的^义务\n",
        "第^{n}^章^：业主^一方^的^权利\n",
        "第^{n}^章^：场地^与^开放\n",
        "第^{n}^章^：其余^条款\n",
    ),
    titles=(
        "框架^合同^，编号^{v}^，自^第^{n}^章^起\n",
        "双方^：业主^一方^{p}^（{c}^），经营^一方^{q}^（{d}^）。\n",
    ),
    keys=("{e}^的^{a}", "{e}^{a}"),
    every=("{e}^的^全部^{a}", "{e}^全部^{a}"),
    nowhere="没有^条款^写明^。",
)

_STATUTE = replace(
    _CONTRACT,
    attributes=pairs("""
        amount: 执照^费用, 许可^费用, 年度^税款, 停车^罚款, 噪声^罚款, 维修^补助, 供暖^补助
        amount: 建设^押金
        percent: 税款^费率, 垃圾^费率, 用水^比例, 绿化^比例
        days: 申诉^期限, 申报^期限, 关闭^期限
        metres: 高度^上限, 宽度^上限
        persons: 访客^上限
        date: 申报^日期, 审计^日期, 复核^日期
        code: 档案^编号
        person: 首席^监督
        place: 登记^地点"""),
    lists=pairs("""
        person: 副职^监督, 宣誓^专家
        place: 投票^地点, 收集^地点"""),
    facts=(
        "{h}{e}^的^{a}^为^{v}^。\n",
        "{h}对于^{e}^，法律^规定^{a}^为^{v}^。\n",
        "{h}就^{e}^而言^，{a}^应为^{v}^。\n",
    ),
    amended=(
        "{h}第^{n}^次^修订^：{e}^的^{a}^为^{v}^。\n",
        "{h}第^{n}^次^修订^：对于^{e}^，法律^规定^{a}^为^{v}^。\n",
    ),
    first=("{h}{e}^的^{a}^，法律^指定^{v}^。\n",),
    further=("{h}{e}^的^{a}^，除^{b}^外^，法律^指定^{v}^。\n",),
    fillers=(
        "{h}议会^应^保持^全部^场地^的^登记^。\n",
        "{h}申诉^应^采用^书面^形式^。\n",
        "{h}{e}^的^业主^权利^不^受^影响^。\n",
        "{h}议会^应^通知^{e}^。\n",
        "{h}个别^条款^无效^，不^影响^其余^条款^。\n",
        "{h}议会^可^检查^{e}^。\n",
        "{h}本^法律^适用^年度^复核^。\n",
    ),
    headings=(
        "第^{n}^章^：费用^与^期限\n",
        "第^{n}^章^：议会^的^义务\n",
        "第^{n}^章^：业主^的^权利\n",
        "第^{n}^章^：场地^与^开放\n",
        "第^{n}^章^：其余^条款\n",
    ),
    titles=(
        "场地^法律^，编号^{v}^，自^第^{n}^条^起\n",
        "议会^：{c}^，{d}^；签署^：{p}^，{q}^。\n",
    ),
)

_LOG = Grammar(
    head="{r} {t}",
    cite="第^{r}^行",
    lower=True,
    quoted=True,
    attributes=pairs("""
        number: 延迟, 容量, 速率, 状态, 重试, 端口, 时长, 负载, 队列, 会话, 内存, 磁盘
        number: 线程, 报文
        code: 令牌, 跟踪, 构建, 版本
        person: 用户, 属主, 值守
        place: 区域, 分区, 来源"""),
    lists=pairs("""
        person: 访客, 审核
        place: 镜像, 副本"""),
    facts=(
        "{h} INFO {e}^ {a}^={v}\n",
        "{h} INFO {e}^ 报告^ {a}^={v}\n",
        "{h} WARN {e}^ {a}^={v}\n",
    ),
    amended=(
        "{h} INFO {e}^ {a}^={v}\n",
        "{h} WARN {e}^ {a}^={v}\n",
    ),
    first=("{h} INFO {e}^ {a}^ 首个^={v}\n",),
    further=("{h} INFO {e}^ {a}^ 除^{b}^外^={v}\n",),
    fillers=(
        "{h} INFO {e}^ 启动\n",
        "{h} INFO {e}^ 停止\n",
        "{h} WARN {e}^ 缓慢\n",
        "{h} INFO 全部^检查^通过\n",
        "{h} INFO 日志^关闭^，开放^日志\n",
        "{h} WARN 时钟^复核\n",
        "{h} INFO {e}^ 检查^通过\n",
    ),
    headings=(),
    titles=(
        "日志^，构建^{v}^，自^第^{n}^行^起\n",
        "登记^：{p}^，{q}^；地点^：{c}^，{d}\n",
    ),
    keys=("{e}^的^{a}", "{e}^{a}"),
    every=("{e}^的^全部^{a}", "{e}^全部^{a}"),
    nowhere="没有^一行^写明^。",
)

_CODE = replace(
    _LOG,
    head="{r} | ",
    attributes=pairs("""
        number: 超时, 重试^上限, 重试^延迟, 最大^容量, 最小^容量, 批次^容量, 页面^容量, 线程^容量, 缓存^容量
        number: 最大^负载, 端口, 权重, 配额, 深度, 窗口, 偏移
        code: 令牌, 构建, 版本
        person: 属主, 作者
        place: 区域, 分区, 来源"""),
    lists=pairs("""
        person: 审核, 测试
        place: 镜像, 副本"""),
    facts=(
        "{h}{e}^.{a}^ = {v}\n",
        "{h}{e}^.{a}^ = {v}  # 通过\n",
        "{h}{e}^.{a}^ = {v}  # 附件\n",
    ),
    amended=(
        "{h}{e}^.{a}^ = {v}\n",
        "{h}{e}^.{a}^ = {v}  # 通过\n",
    ),
    first=("{h}{e}^.{a}^.首个^ = {v}\n",),
    further=("{h}{e}^.{a}^.除[{o}] = {v}\n",),
    fillers=(
        "{h}# 容量^为^字节\n",
        "{h}# 检查^通过\n",
        "{h}# {e}^缓慢\n",
        "{h}import {e}\n",
        "{h}# {e}^的^附件\n",
        "{h}# 构建^登记\n",
        "{h}{e}^.启动^()\n",
    ),
    titles=(
        "代码^，构建^{v}^，自^第^{n}^行^起\n",
        "登记^：{p}^，{q}^；地点^：{c}^，{d}\n",
    ),
    keys=("{e}^.{a}", "{e}^.{a}^的^数值"),
    every=("全部^{e}^.{a}", "{e}^.{a}^的^全部^数值"),
)

_TABLE = replace(
    _LOG,
    head="{r} | ",
    lower=False,
    quoted=False,
    attributes=pairs("""
        amount: 每月^租金, 服务^费用, 清洁^费用, 供暖^费用, 维修^预算, 年度^收入, 库存^价值
        percent: 租金^折扣, 利润^比例, 税款^费率
        metres: 房屋^高度, 大门^宽度
        persons: 员工^人数, 访客^人数
        days: 付款^期限, 维修^期限
        date: 交付^日期, 检查^日期, 审计^日期
        code: 账户^编号, 许可^编号
        person: 现场^经理, 首席^技师
        place: 供应^基地"""),
    lists=_CONTRACT.lists,
    facts=(
        "{h}{e}^ | {a}^ | {v}^ | 通过\n",
        "{h}{e}^ | {a}^ | {v}^ | 开放\n",
        "{h}{e}^ | {a}^ | {v}^ | 关闭\n",
    ),
    amended=(
        "{h}{e}^ | {a}^ | {v}^ | 通过\n",
        "{h}{e}^ | {a}^ | {v}^ | 开放\n",
    ),
    first=("{h}{e}^ | {a}^ | 首个^ | {v}^ | 通过\n",),
    further=("{h}{e}^ | {a}^ | 除^{b}^外^ | {v}^ | 通过\n",),
    fillers=(
        "{h}{e}^ | 没有^登记\n",
        "{h}{e}^ | 附件\n",
        "{h}{e}^ | 检查^通过\n",
        "{h}{e}^ | 关闭\n",
        "{h}全部^场地^ | 通过\n",
        "{h}页面^合计^ | 附件\n",
        "{h}登记^页面\n",
    ),
    titles=(
        "场地^登记^，编号^{v}^，自^第^{n}^行^起\n",
        "登记^：{p}^，{q}^；地点^：{c}^，{d}\n",
    ),
)


def _marked(grammar: Grammar) -> Grammar:
    """The grammar with the real boundary mark for ``^``."""
    changed: dict[str, object] = {}
    for field in fields(grammar):
        value = getattr(grammar, field.name)
        if isinstance(value, str):
            changed[field.name] = value.replace("^", MARK)
        elif isinstance(value, tuple):
            changed[field.name] = tuple(
                Attribute(item.name.replace("^", MARK), item.kind)
                if isinstance(item, Attribute)
                else item.replace("^", MARK)
                for item in value
            )
    return replace(grammar, **changed)  # type: ignore[arg-type]


def _asks(*endings: str) -> tuple[str, ...]:
    return tuple(ending.replace("^", MARK) for ending in endings)


_HOW_MUCH = _asks("{k}^是^多少^？", "请^说明^{k}^。", "请^列出^{k}^。")
_WHAT = _asks("{k}^是^什么^？", "请^说明^{k}^。", "请^列出^{k}^。")

CHINESE = Tongue(
    firsts=FIRSTS,
    seconds=SECONDS,
    persons=PERSONS,
    places=PLACES,
    months=MONTHS,
    values={
        kind: text.replace("^", MARK)
        for kind, text in {
            "amount": "{x}^元",
            "percent": "百分之^{x}.{y}",
            "days": "{x}^天",
            "metres": "{x}^米",
            "persons": "{x}^人",
            "number": "{x}",
            "date": "{x}^月^{y}^日",
            "code": "{x}-{y}",
            "person": "{x}",
            "place": "{x}",
        }.items()
    },
    yearly="每年^{v}".replace("^", MARK),
    entity="{x}^{y}".replace("^", MARK),
    identifier="{x}^{y}".replace("^", MARK),
    single={
        **dict.fromkeys(QUANTITIES, _HOW_MUCH),
        "date": _WHAT,
        "code": _WHAT,
        "place": _WHAT,
        "person": _asks("{k}^是^谁^？", "请^说明^{k}^。", "请^列出^{k}^。"),
    },
    last=_asks("{k}^的^最新^内容^是^什么^？", "请^说明^{k}^的^最新^内容^。", "最新^内容^：{k}^？"),
    several=_asks("请^说明^{k}^。", "{k}^是^什么^？"),
    listing=_asks("请^列出^{k}^。", "{k}^是^什么^？"),
    count=_asks("{l}^共^多少^？", "请^合计^{l}^。"),
    joins=_asks("、", "^和^"),  # type: ignore[arg-type]
    answer="{v}^（{c}^）".replace("^", MARK),
    answers="；",
    counted="{c}^：{n}".replace("^", MARK),
    cites="、",
    absent="文中^没有^。".replace("^", MARK),
    thought="在^{c}^。".replace("^", MARK),
    thoughts="在^{c}^。".replace("^", MARK),
    domains={
        name: _marked(grammar)
        for name, grammar in {
            "contract": _CONTRACT,
            "statute": _STATUTE,
            "log": _LOG,
            "code": _CODE,
            "table": _TABLE,
        }.items()
    },
)
